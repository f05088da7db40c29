"""`covey why` on planted causes: real runs of the demo model, one cause each, and healthy ones. Counts of the cause named first.

    python benchmarks/why.py                       # ten seeds of each: about half an hour on one processor
    python benchmarks/why.py slice healthy --seeds 3

The causes are those of `tests/why/planted.py`. Intervals: Wilson, 95%.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from covey.doctor.why.causes import diagnose, is_named
from covey.doctor.why.recorded import load
from covey.evaluation.intervals import proportion

sys.path.append(str(Path(__file__).parent.parent / "tests" / "why"))
import planted

CASES = {**planted.PLANTED, "healthy": partial(planted.healthy, steps=planted.STEPS_OF_SLICES)}


def named(case: str, seed: int) -> tuple[str, str]:
    """Kind of the change ranked first, "nothing" without one; and the whole ranking in a line."""
    with tempfile.TemporaryDirectory() as scratch:
        step = CASES[case](Path(scratch) / "run", seed)
        found = diagnose(load(Path(scratch) / "run", step))
    ranking = "; ".join(f"{one.change.said} {one.share:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in found.remedies)
    first = found.remedies[0] if found.remedies and is_named(found.remedies[0]) else None
    return "nothing" if first is None else first.change.kind, f"step {step}: {ranking}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, Counter[str]] = {case: Counter() for case in given.cases or CASES}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for case, row in table.items():
            start = time.process_time()
            kind, ranking = named(case, seed)
            row[kind] += 1
            print(
                f"{case} {seed}: {kind}; {ranking} ({time.process_time() - start:.0f} s)", file=sys.stderr, flush=True
            )
    kinds = sorted({kind for row in table.values() for kind in row})
    print(f"| planted | {' | '.join(kinds)} | named rightly |\n|---|{'--:|' * (len(kinds) + 1)}")
    for case, row in table.items():
        right = row["nothing" if case == "healthy" else case]
        share = proportion(right, row.total())
        cells = " | ".join(str(row[kind]) for kind in kinds)
        print(
            f"| {case} | {cells} | {right} of {row.total()} ({100 * share.low:.0f} to {100 * share.high:.0f}%) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
