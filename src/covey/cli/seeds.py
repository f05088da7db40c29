"""`covey train --seeds N`: the same run with N seeds, one after another, and how sure their mean is."""

import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.verb import Args
from covey.errors import ConfigError
from covey.experiments import child, series
from covey.experiments.attempt import number_of
from covey.experiments.several import Book, shown_metrics, summary


def run(args: Args, overrides: Mapping[str, Any], cli_args: Mapping[str, Any]) -> int:
    """Train every seed that has not ended yet, in `output_dir/seed-N`, and show them all with the mean.

    The same command continues an interrupted one: seeds that ended are kept, the one that was interrupted resumes
    from its checkpoint. Returns the exit code of the first seed that failed, else 0.
    """
    import yaml

    from covey.cli.plan import as_yaml
    from covey.runs.lock import FolderLock
    from covey.runs.signals import StopRequest

    if args.get("resume") not in (None, "never", "auto"):
        raise ConfigError("--seeds goes on by itself where it stopped; leave --resume out.")
    child.refuse_launcher("--seeds")
    names = {f"seed-{number}": number for number in numbers(overrides, args["seeds"])}
    folder = Path(str(overrides["output_dir"])).expanduser()
    settings = {name: value for name, value in cli_args.items() if name not in series.NEVER}
    options = {name: value for name, value in overrides.items() if name not in {"seed", *series.NEVER}}
    text = as_yaml(options, settings)
    series.claim(folder, yaml.safe_load(text), "seeds")
    book = Book(folder, is_seeds=True, say=output.say)
    codes = []
    with FolderLock(folder), StopRequest() as stop, child.options_file(text) as file:
        for place, (name, number) in enumerate(names.items(), 1):
            if name in book.results:
                continue
            output.say(f"seed {number} ({place} of {len(names)}): {folder / name}")
            series.make_way(folder / name)
            words = ["--config", file, "--seed", str(number), "--output-dir", str(folder / name)]
            ended = child.train([*words, "--resume", "auto"], folder / f"{name}.log", stop)
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
            book.add(name, ended.result)
    report(book, names, args)
    return codes[0] if codes else 0


def numbers(overrides: Mapping[str, Any], count: int) -> range:
    """As many seeds, from `--seed` on."""
    first = int(overrides.get("seed", 0))
    return range(first, first + count)


def report(book: Book, names: Iterable[str], args: Args) -> None:
    """Show the results of these runs, and of seeds the mean, as a table or JSON."""
    results, kind = book.of(names), "seed" if book.is_seeds else "run"
    means = summary(results) if book.is_seeds else {}
    if args.get("json"):
        estimates = {
            name: {"mean": e.value, "low": e.low, "high": e.high, "seeds": e.count} for name, e in means.items()
        }
        more = {"summary": estimates} if book.is_seeds else {}
        output.result_json({"run": str(book.folder), f"{kind}s": results, **more})
        return
    if not results:
        output.result(f"no {kind} ended: {book.folder}")
        return
    metrics = shown_metrics([result["metrics"] for result in results.values()])
    width = max(map(len, (kind, *results))) + 2
    output.result(f"{kind:<{width}}{'steps':>7}  " + "  ".join(f"{metric:>18}" for metric in metrics))
    for name, result in results.items():
        values = "  ".join(f"{number_of(result['metrics'].get(metric)):>18.4g}" for metric in metrics)
        output.result(f"{name:<{width}}{result['steps']:>7}  {values}")
    for name, e in means.items():
        unsure = "one seed says nothing of the next" if e.count == 1 else "equal so far: no spread was measured"
        sure = f"95% {e.low:.4g} to {e.high:.4g}" if math.isfinite(e.low) else unsure
        output.result(f"{name}: {e.value:.4g} on average ({sure}, {e.count} seeds)")
    if metrics == ["reward"]:
        output.say(
            "These are mean rewards of the last --logging-steps in training; --eval-dataset gives what counts, held-out ones."
        )
