"""Programs a second through the sandbox: MBPP's reference solutions and their tests.

    python benchmarks/sandbox.py [--data tests/data/mbpp/mbpp.jsonl] [--workers 2] [--repeat 3]

The cost of a bare interpreter is measured in the same run: what a sandbox that starts one for each program could do at best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from covey.sandbox import Result, Sandbox


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="tests/data/mbpp/mbpp.jsonl")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    rows = [json.loads(line) for line in Path(given.data).read_text().splitlines()]
    with Sandbox(given.workers) as sandbox, ThreadPoolExecutor(given.workers) as threads:
        print(f"in force: {sandbox.isolation}")

        def judge(row: dict) -> Result:
            return sandbox.run(row["code"], row["test_list"], setup=row["test_setup_code"], timeout=30)

        list(threads.map(judge, rows[: 2 * given.workers]))  # workers are started when first needed
        rates, bare = [], []
        for _ in range(given.repeat):
            started = time.perf_counter()
            results = list(threads.map(judge, rows))
            rates.append(len(rows) / (time.perf_counter() - started))
            started = time.perf_counter()
            command = [sys.executable, "-I", "-S", "-c", "pass"]
            list(threads.map(lambda _, command=command: subprocess.run(command, check=True), range(40)))
            bare.append(40 / (time.perf_counter() - started))
    print(f"verdicts: {dict(Counter(result.reason for result in results))}")
    print(f"programs a second: median {statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})")
    print(
        f"bare interpreters a second: median {statistics.median(bare):.0f}: {statistics.median(rates) / statistics.median(bare):.1f}x"
    )


if __name__ == "__main__":
    main()
