"""`covey train --seeds N`: the same run with N seeds, one after another, and how sure their mean is."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import child, output, series
from covey.cli.rerun import NEVER
from covey.cli.verb import Given
from covey.errors import ConfigError

if TYPE_CHECKING:
    from covey.evaluation.intervals import Estimate

RESULTS = "seeds.json"
"""File of final results by seed, in the folder of all seeds."""
Results = dict[int, dict[str, Any]]


def run(given: Given, wanted: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    """Train every seed that has not ended yet, in `output_dir/seed-N`, and show them all with the mean.

    The same command continues an interrupted one: seeds that ended are kept, the one that was interrupted resumes
    from its checkpoint. Returns the exit code of the first seed that failed, else 0.
    """
    import yaml

    from covey.cli.plan import as_yaml
    from covey.runs.lock import FolderLock
    from covey.runs.signals import StopRequest

    numbers = _numbers(given, wanted)
    folder = Path(str(wanted["output_dir"])).expanduser()
    kept = {name: value for name, value in own.items() if name not in NEVER}
    options = {name: value for name, value in wanted.items() if name not in {"seed", *NEVER}}
    text = as_yaml(options, kept)
    results = begin(folder, yaml.safe_load(text))
    codes = []
    lock = FolderLock(folder)
    lock.take()
    try:
        with StopRequest() as stop, child.options_file(text) as file:
            for number in numbers:
                if number in results:
                    continue
                output.say(
                    f"seed {number} ({numbers.index(number) + 1} of {len(numbers)}): {folder / f'seed-{number}'}"
                )
                series.make_way(folder / f"seed-{number}")
                words = ["--config", file, "--seed", str(number), "--output-dir", str(folder / f"seed-{number}")]
                ended = child.train([*words, "--resume", "auto"], folder / f"seed-{number}.log", stop)
                if stop.requested:
                    output.say(f"Stopped at seed {number}; go on with: {series.again(sys.argv, folder)}")
                    return stop.exit_code
                if ended.code or not ended.result:
                    codes.append(ended.code or 1)
                    output.say(
                        f"warning: seed {number} failed with exit code {codes[-1]}; the same command tries it again."
                    )
                    if ended.code == 2:  # wrong input is wrong for every seed
                        break
                    continue
                results[number] = dict(ended.result)
                write(folder, results)
    finally:
        lock.release()
    report(folder, {number: results[number] for number in numbers if number in results}, given)
    return codes[0] if codes else 0


def _numbers(given: Given, wanted: Mapping[str, Any]) -> list[int]:
    count = given["seeds"]
    if count < 1:
        raise ConfigError(f"--seeds {count} is no number of runs; give 2 or more, such as 5.")
    if given.get("resume") not in (None, "never", "auto"):
        raise ConfigError("--seeds goes on by itself where it stopped; leave --resume out.")
    child.refuse_launcher("--seeds")
    first = int(wanted.get("seed", 0))
    return list(range(first, first + count))


def begin(folder: Path, options: Mapping[str, Any]) -> Results:
    """Claim the folder for these options. Returns earlier results. Raises RunFolderError when it holds something else."""
    series.claim(folder, options, "seeds")
    path = folder / RESULTS
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {int(number): result for number, result in found.items()}


def write(folder: Path, results: Results) -> None:
    from covey.runs.storage import write_atomically

    write_atomically(folder / RESULTS, json.dumps({str(n): r for n, r in sorted(results.items())}, indent=1).encode())


def summary(results: Results) -> dict[str, Estimate]:
    """Mean and Student's 95% interval over seeds of what each ended with: held-out rewards, or the last training reward."""
    from covey.evaluation.intervals import mean_of_few

    names = shown_metrics([result["metrics"] for result in results.values()])
    values = {name: [number_of(result["metrics"].get(name)) for result in results.values()] for name in names}
    return {name: mean_of_few(several) for name, several in values.items()}


def shown_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """`eval_reward` and the mean of each reward on held-out prompts; `reward` where nothing was evaluated."""
    names = sorted(set().union(*metrics)) if metrics else []
    held_out = [name for name in names if name.startswith("eval_rewards/") and name.endswith("/mean")]
    return ["eval_reward", *(held_out if len(held_out) > 1 else [])] if "eval_reward" in names else ["reward"]


def number_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def report(folder: Path, results: Results, given: Given) -> None:
    found = summary(results)
    if given.get("json"):
        estimates = {
            name: {"mean": e.value, "low": e.low, "high": e.high, "seeds": e.count} for name, e in found.items()
        }
        output.result_json({"run": str(folder), "seeds": {str(n): r for n, r in results.items()}, "summary": estimates})
        return
    if not results:
        output.result(f"no seed ended: {folder}")
        return
    names = list(found)
    output.result(f"{'seed':<6}{'steps':>7}  " + "  ".join(f"{name:>18}" for name in names))
    for number, result in sorted(results.items()):
        values = "  ".join(f"{number_of(result['metrics'].get(name)):>18.4g}" for name in names)
        output.result(f"{number:<6}{result['steps']:>7}  {values}")
    for name, e in found.items():
        sure = f"95% {e.low:.4g} to {e.high:.4g}" if math.isfinite(e.low) else "one seed says nothing of the next"
        output.result(f"{name}: {e.value:.4g} on average ({sure}, {e.count} seeds)")
    say_if_not_held_out(names)


def say_if_not_held_out(metrics: Sequence[str]) -> None:
    """Say below a table of these metrics if they are of training."""
    if metrics == ["reward"]:
        output.say(
            "These are mean rewards of the last --logging-steps in training; --eval-dataset gives what counts, held-out ones."
        )
