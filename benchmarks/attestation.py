"""Attestation of a server's weights, simulated: alarms in quiet updates, and updates until a server that stays behind is found.

    python benchmarks/attestation.py --seeds 20

The simulated server answers a probe of 64 tokens with its own log-probabilities and normal noise (0.01 nats: bfloat16's size), so that only the
slope can tell. "Stays behind": from update 21 on it keeps its weights, whatever it is sent. The simulation is that of
`tests/vllm_server/test_attestation.py`, whose tests lie to a server that computes with a real model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
STAYS_AFTER, MOST = 20, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="servers that stay behind, for each size of update")
    parser.add_argument("--quiet", type=int, default=1000, help="quiet updates, for each size of update")
    parser.add_argument("--noise", type=float, default=0.01, help="nats")
    given = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS / "vllm_server")]
    from test_attestation import quiet_run

    print(
        f"| update, nats | alarms in {given.quiet:,} quiet updates | found of {given.seeds} | after updates, median | at most |"
    )
    print("|--:|--:|--:|--:|--:|")
    for size in (0.1, 0.01, 0.003):
        alarm = quiet_run(given.quiet, given.noise, size, seed=int(1e4 * size))
        ends = [quiet_run(MOST, given.noise, size, stuck_after=STAYS_AFTER, seed=seed) for seed in range(given.seeds)]
        found = [end - STAYS_AFTER for end in ends if end is not None and end > STAYS_AFTER]
        after = f"{statistics.median(found):g} | {max(found)}" if found else "- | -"
        print(f"| {size:g} | {'none' if alarm is None else f'at {alarm}'} | {len(found)} | {after} |", flush=True)


if __name__ == "__main__":
    main()
