"""Processes of one attempt find each other over a store in which earlier attempts left their keys."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from covey import GRPOConfig
from covey.errors import ConfigError, RankError
from covey.process import world
from covey.process.rendezvous import agree
from forked import rank_environment, run

WAIT = 60.0


def all_agree(store: HashStore, size: int = 3) -> set[str]:
    """The names that `size` processes got, one of them late."""

    def one(rank: int) -> str:
        time.sleep(0.2 * (rank == 1))
        return agree(store, rank, size, WAIT)

    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(one, range(size)))


def test_all_processes_of_an_attempt_get_one_name_and_the_next_attempt_another() -> None:
    store = HashStore()
    names = [all_agree(store) for _ in range(3)]
    assert [len(each) for each in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_a_process_that_died_while_it_waited_is_not_taken_for_the_one_in_its_place() -> None:
    store = HashStore()
    with pytest.raises(RankError, match=r"rank 0, or one that it waits for, did not come to the start within"):
        agree(store, 1, 3, 0.1)
    with pytest.raises(
        RankError, match=r"rank 1 did not come to the start within .* Start the run again with --resume"
    ):
        agree(store, 0, 3, 0.1)  # answers the word of the one that is gone
    assert len(all_agree(store)) == 1


def test_a_process_that_took_the_name_of_a_dead_rank_0_takes_that_of_the_next_one() -> None:
    store = HashStore()
    found: list[str] = []
    early = threading.Thread(target=lambda: found.append(agree(store, 1, 3, WAIT)))
    early.start()
    with pytest.raises(RankError, match="rank 2 did not come"):
        agree(store, 0, 3, 1.0)
    other = threading.Thread(target=lambda: found.append(agree(store, 2, 3, WAIT)))
    other.start()
    found.append(agree(store, 0, 3, WAIT))
    for thread in (early, other):
        thread.join(WAIT)
    assert len(found) == 3
    assert len(set(found)) == 1


def test_what_an_earlier_attempt_said_is_not_heard_in_a_group_that_a_script_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    store = HashStore()
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            heartbeat = world._heartbeat_of(0, 2, WAIT)
            assert heartbeat is not None
            for _ in range(2):
                heartbeat._tell()
            assert heartbeat.others == {}
            heartbeat.rank = 1  # the last word of rank 1 in this attempt
            heartbeat.end("ended")
            heartbeat.stop()
        finally:
            world._HEARTBEATS.clear()
            dist.destroy_process_group()


GONE = """
import atexit, types
import torch, torch.distributed as dist
atexit.register(lambda: print("there" if dist.is_initialized() else "left", flush=True))  # called last
from accelerate import PartialState
PartialState(cpu=True, backend="gloo")
from covey.process.world import World
world = World.of(types.SimpleNamespace(device=torch.device("cpu"), ddp_timeout=60))
assert world.sum(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
"""


@pytest.mark.slow
def test_a_process_leaves_the_group_before_it_ends() -> None:
    """Gloo's threads abort a process that ends with them: one in four of such scripts on a loaded machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", GONE],
            env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    assert [(one.communicate(timeout=WAIT)[0].strip(), one.returncode) for one in started] == [("left", 0)] * 2


COMMAND = "import sys; from covey.cli import main; sys.exit(main(sys.argv[1:]))"


def test_a_port_on_which_another_program_listens_is_named_in_a_sentence() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        train = ["train", "--model", "demo", "--dataset", "demo", "--reward", "length", "--use-cpu", "true"]
        done = run("-c", COMMAND, *train, env=rank_environment(0, str(port)))
    assert done.returncode == 2, done.err
    assert f"port {port} (MASTER_PORT)" in done.err
    assert f"--master_port {port + 1}" in done.err
    assert "Traceback" not in done.err


def test_a_local_rank_without_the_rest_of_a_launcher_is_told_in_a_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(
        ConfigError, match="RANK and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set; unset LOCAL_RANK"
    ):
        GRPOConfig(str(tmp_path), report_to="none")
