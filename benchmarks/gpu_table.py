"""Run the benchmarks of a GPU and write what they measured into docs/performance.md. `make gpu` does it after the tests.

python benchmarks/gpu_table.py            # half an hour on one GPU of 80 GiB
python benchmarks/gpu_table.py --tiny     # small shapes, to see that all of it runs; writes nothing
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
TINY = {
    "learner_cuda.py": ["--size", "tiny", "--prompts", "4", "--repeats", "2"],
    "heads.py": ["--tokens", "512", "--width", "64", "--vocabulary", "4096", "--repeats", "2"],
    "rollout_cuda.py": ["--prompts", "4", "--prompt-tokens", "32", "--max-tokens", "32", "--repeats", "2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("The table needs a CUDA device, and torch finds none.")
    options = TINY if given.tiny else {name: [] for name in TINY}
    text = section(torch.cuda.get_device_name(), {name: measured(name, more) for name, more in options.items()})
    print(text)
    if not given.tiny:
        PAGE.write_text(placed(PAGE.read_text(), text))


def measured(script: str, options: list[str]) -> dict[str, Any]:
    """The JSON object on the script's last line."""
    done = subprocess.run([sys.executable, str(HERE / script), *options], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{script} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def section(device: str, found: dict[str, dict[str, Any]]) -> str:
    """Three tables in Markdown."""
    learner, heads, rollout = (found[name] for name in ("learner_cuda.py", "heads.py", "rollout_cuda.py"))
    lines = [f"Measured on {device}, torch {torch.__version__}.", ""]
    lines += [
        "| learner | s a step | MFU | peak above weights and optimizer, MiB | longest completion |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, one in learner["sides"].items():
        lines.append(
            f"| {name} | {one['step']:.2f} | {one['mfu']:.0%} | {one['peak_above_mib']:.0f} | {one['longest'] or ''} |"
        )
    lines += ["", "| output layer | ms | peak, MiB | error, hidden states | error, weight |", "|---|--:|--:|--:|--:|"]
    for name, one in heads.items():
        errors = " | ".join(f"{error:.1e}" for error in one["errors"])
        lines.append(f"| {name} | {1000 * one['seconds']:.1f} | {one['peak_mib']:.0f} | {errors} |")
    lines += ["", "| rollout | s | tokens/s | peak, GiB |", "|---|--:|--:|--:|"]
    for name, one in rollout["sides"].items():
        lines.append(f"| {name} | {_rollout_cells(one)} |")
    return "\n".join(lines)


def _rollout_cells(one: dict[str, Any]) -> str:
    if "failed" in one:
        return f"{one['failed']} | | "
    return f"{one['seconds']:.2f} | {one['tokens_per_second']:.0f} | {one['peak_gib']:.1f}"


def placed(page: str, text: str) -> str:
    """The page with `text` between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


if __name__ == "__main__":
    main()
