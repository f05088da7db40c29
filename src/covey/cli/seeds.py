"""`covey train --seeds N`: the same run with N seeds, one after another, and how sure their mean is."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.rerun import NEVER
from covey.cli.verb import Args
from covey.errors import ConfigError
from covey.experiments import child, series
from covey.experiments.attempt import number_of
from covey.experiments.seeds import Results, begin, summary, write


def run(args: Args, overrides: Mapping[str, Any], cli_args: Mapping[str, Any]) -> int:
    """Train every seed that has not ended yet, in `output_dir/seed-N`, and show them all with the mean.

    The same command continues an interrupted one: seeds that ended are kept, the one that was interrupted resumes
    from its checkpoint. Returns the exit code of the first seed that failed, else 0.
    """
    import yaml

    from covey.cli.plan import as_yaml
    from covey.runs.lock import FolderLock
    from covey.runs.signals import StopRequest

    numbers = _numbers(args, overrides)
    folder = Path(str(overrides["output_dir"])).expanduser()
    settings = {name: value for name, value in cli_args.items() if name not in NEVER}
    options = {name: value for name, value in overrides.items() if name not in {"seed", *NEVER}}
    text = as_yaml(options, settings)
    results = begin(folder, yaml.safe_load(text))
    codes = []
    with FolderLock(folder), StopRequest() as stop, child.options_file(text) as file:
        for number in numbers:
            if number in results:
                continue
            output.say(f"seed {number} ({numbers.index(number) + 1} of {len(numbers)}): {folder / f'seed-{number}'}")
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
    report(folder, {number: results[number] for number in numbers if number in results}, args)
    return codes[0] if codes else 0


def _numbers(args: Args, overrides: Mapping[str, Any]) -> list[int]:
    count = args["seeds"]
    if count < 1:
        raise ConfigError(f"--seeds {count} is no number of runs; give 2 or more, such as 5.")
    if args.get("resume") not in (None, "never", "auto"):
        raise ConfigError("--seeds goes on by itself where it stopped; leave --resume out.")
    child.refuse_launcher("--seeds")
    first = int(overrides.get("seed", 0))
    return list(range(first, first + count))


def report(folder: Path, results: Results, args: Args) -> None:
    means = summary(results)
    if args.get("json"):
        estimates = {
            name: {"mean": e.value, "low": e.low, "high": e.high, "seeds": e.count} for name, e in means.items()
        }
        output.result_json({"run": str(folder), "seeds": {str(n): r for n, r in results.items()}, "summary": estimates})
        return
    if not results:
        output.result(f"no seed ended: {folder}")
        return
    names = list(means)
    output.result(f"{'seed':<6}{'steps':>7}  " + "  ".join(f"{name:>18}" for name in names))
    for number, result in sorted(results.items()):
        values = "  ".join(f"{number_of(result['metrics'].get(name)):>18.4g}" for name in names)
        output.result(f"{number:<6}{result['steps']:>7}  {values}")
    for name, e in means.items():
        unsure = "one seed says nothing of the next" if e.count == 1 else "equal so far: no spread was measured"
        sure = f"95% {e.low:.4g} to {e.high:.4g}" if math.isfinite(e.low) else unsure
        output.result(f"{name}: {e.value:.4g} on average ({sure}, {e.count} seeds)")
    say_if_not_held_out(names)


def say_if_not_held_out(metrics: Sequence[str]) -> None:
    """Say below a table of these metrics if they are of training."""
    if metrics == ["reward"]:
        output.say(
            "These are mean rewards of the last --logging-steps in training; --eval-dataset gives what counts, held-out ones."
        )
