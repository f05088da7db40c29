"""Starts one `torchrun` on every node of a Ray cluster, as `kuberay.yaml` does; all meet at the first node.

    python on_each_node.py --nodes 2 -m covey train --config run.yaml

What is not known here is torchrun's. Ends with the exit code of the first node that failed.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Node:
    """A node of the run."""

    def address(self) -> tuple[str, int]:
        """Where the others find this one: its address, and a port that is free now."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), int(free.getsockname()[1])

    def run(self, nodes: int, per_node: int, rank: int, where: tuple[str, int], command: list[str]) -> int:
        """`torchrun` until it ends."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node_rank", str(rank)]
        launch += ["--nproc_per_node", str(per_node), "--master_addr", where[0], "--master_port", str(where[1])]
        return subprocess.run([*launch, *command], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=8, help="0: one process a node, on its CPU")
    parser.add_argument("--strategy", default="STRICT_SPREAD", help="PACK puts several on one machine, to try it")
    given, command = parser.parse_known_args()
    ray.init()
    needs = {"CPU": 1, **({"GPU": given.gpus_per_node} if given.gpus_per_node else {})}
    group = placement_group([needs] * given.nodes, strategy=given.strategy)
    ray.get(group.ready(), timeout=600)
    nodes = []
    for place in range(given.nodes):
        there = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=place)
        nodes.append(Node.options(num_cpus=1, num_gpus=given.gpus_per_node, scheduling_strategy=there).remote())
    where = ray.get(nodes[0].address.remote())
    per_node = given.gpus_per_node or 1
    running = [one.run.remote(given.nodes, per_node, i, where, command) for i, one in enumerate(nodes)]
    while running:
        done, running = ray.wait(running, num_returns=1)
        if code := ray.get(done[0]):
            return int(code)  # Ray ends the others with this process
    return 0


if __name__ == "__main__":
    sys.exit(main())
