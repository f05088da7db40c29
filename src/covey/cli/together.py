"""`covey train --adapters N`, `--vary NAME=A,B`, `--seeds N --share-base`: several adapters on one base, in one process."""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.cli import child, output, seeds, series
from covey.cli.adapter import adapter
from covey.cli.flags import Flag, typed
from covey.cli.rerun import NEVER
from covey.cli.search import choices
from covey.cli.verb import Given
from covey.errors import ConfigError, CoveyError

RESULTS = "together.json"
"""File of final results by run, in the folder of runs that vary options."""
OF_THE_BASE = frozenset({"model", "dtype", "model_init_kwargs", "trust_remote_code"})
OF_THE_DATA = frozenset(
    {
        "dataset",
        "prompt_column",
        "answer_column",
        "columns",
        "system_prompt",
        "dataset_config",
        "streaming",
        "max_prompts",
    }
)
OF_THE_PROCESS = frozenset({"use_cpu", "full_determinism", "report_to"})


@dataclass(frozen=True)
class Outcome:
    """End of a run. `metrics` is empty where a stop signal ended it."""

    steps: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None
    exit_code: int = 0
    has_trained: bool = True
    tells: bool = True
    """True if this process is the one that reports."""


Steps = Generator[Any, Any, Outcome]
Results = dict[str, dict[str, Any]]


def is_asked(given: Given) -> bool:
    """True if the flags ask for several adapters on one base."""
    return any(given.get(name) for name in ("vary", "share_base")) or given.get("adapters") is not None


def run(
    given: Given,
    wanted: Mapping[str, Any],
    own: Mapping[str, Any],
    options_of: Callable[[Given], dict[str, Any]],
    member_of: Callable[[Given, Any], Steps],
    flags: Mapping[str, Flag],
    types: Mapping[str, Any],
) -> int:
    """Train every run that has not ended yet, a step of each in turn, and show them all.

    The same command continues an interrupted one. Returns the exit code of the first run that failed, else 0.
    `options_of` gives the options of GRPOConfig, `member_of` a run to train on a base.
    """
    import yaml

    from covey.cli.plan import as_yaml
    from covey.models import SharedBase
    from covey.runs.lock import FolderLock
    from covey.runs.signals import StopRequest
    from covey.training.interleaving import Member, interleave

    folder = Path(str(wanted["output_dir"])).expanduser()
    runs = {name: {**own, **wanted, **changes} for name, changes in _runs(given, wanted, flags, types).items()}
    runs = {name: _alone(options, folder / name) for name, options in runs.items()}
    _refuse(runs, options_of)
    kept = {name: value for name, value in own.items() if name not in NEVER or name == "vary"}
    rest = {name: value for name, value in wanted.items() if name not in {"seed", *NEVER}}
    series.claim(folder, yaml.safe_load(as_yaml(rest, kept)), "several runs")
    book = _Book(folder, is_seeds=not given.get("vary"))
    base = SharedBase(given["model"])
    lock = FolderLock(folder)
    lock.take()
    try:
        for name in (waiting := [name for name in runs if name not in book.results]):
            series.make_way(folder / name)
        output.say(f"{len(waiting)} runs on one base, a step of each in turn: {', '.join(waiting) or 'all have ended'}")
        with StopRequest() as stop, stop.for_all():
            interleave([Member(name, member_of(runs[name], base)) for name in waiting], book.ended)
    finally:
        lock.release()
    if stop.requested:
        output.say(f"Stopped; every run has its checkpoint. Go on with: {series.again(sys.argv, folder)}")
        return stop.exit_code
    book.report(runs, given)
    return next(iter(book.failed.values()), 0)


class _Book:
    """Results of the runs of a folder, in memory and in its file; seeds as `covey train --seeds` writes them, so that
    either goes on with the other's."""

    def __init__(self, folder: Path, is_seeds: bool) -> None:
        self.folder, self.is_seeds = folder, is_seeds
        self.failed: dict[str, int] = {}
        """Exit code by run."""
        path = folder / (seeds.RESULTS if is_seeds else RESULTS)
        found = json.loads(path.read_text()) if path.is_file() else {}
        self.results: Results = {f"seed-{name}" if is_seeds else name: result for name, result in found.items()}

    def ended(self, member: Any) -> None:
        """Write down how this `Member` has ended; one that was stopped is not over."""
        if member.error is not None:
            self.failed[member.name] = _told(member.name, member.error, self.folder)
        elif not member.result.stopped_by:
            metrics = dict(member.result.metrics)
            self.results[member.name] = {
                "run": str(self.folder / member.name), "steps": member.result.steps, "seconds": metrics["train_runtime"],
                "metrics": metrics,
            }  # fmt: skip
            self._write()

    def report(self, names: Iterable[str], given: Given) -> None:
        found = {name: self.results[name] for name in names if name in self.results}
        if self.is_seeds:
            seeds.report(self.folder, {_number(name): result for name, result in found.items()}, given)
        else:
            _report(self.folder, found, given)

    def _write(self) -> None:
        from covey.runs.storage import write_atomically

        if self.is_seeds:
            seeds.write(self.folder, {_number(name): result for name, result in self.results.items()})
        else:
            write_atomically(self.folder / RESULTS, json.dumps(self.results, indent=1).encode())


def _runs(
    given: Given, wanted: Mapping[str, Any], flags: Mapping[str, Flag], types: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Options that each run changes, by its name. Raises ConfigError for flags that do not go together."""
    child.refuse_launcher("--vary" if given.get("vary") else "--share-base")
    if given.get("resume") not in (None, "never", "auto"):
        raise ConfigError("Runs on one base go on by themselves where they stopped; leave --resume out.")
    if given.get("streaming"):
        raise ConfigError("Runs on one base read the same rows; leave --streaming out.")
    count, adapters = given.get("seeds"), given.get("adapters")
    if count is not None and adapters is not None:
        raise ConfigError("--adapters N is short for --seeds N --share-base; keep one of them.")
    count = count if adapters is None else adapters
    if given.get("vary"):
        return _varied(given, wanted, count, flags, types)
    if count is None:
        raise ConfigError("--share-base is missing what to train: --seeds N, or --vary NAME=A,B.")
    return {f"seed-{seed}": {"seed": seed} for seed in _seeds(wanted, count)}


def _seeds(wanted: Mapping[str, Any], count: int) -> range:
    if count < 1:
        raise ConfigError(f"{count} is no number of adapters; give 2 or more, such as 4.")
    first = int(wanted.get("seed", 0))
    return range(first, first + count)


def _varied(
    given: Given, wanted: Mapping[str, Any], count: int | None, flags: Mapping[str, Flag], types: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Every combination of the values, with each seed where several are asked for."""
    values = choices(given["vary"], list(flags.values()), "--vary")
    for name in values:
        for why, names in (("base", OF_THE_BASE), ("data set", OF_THE_DATA), ("process", OF_THE_PROCESS)):
            if name in names:
                raise ConfigError(
                    f"--vary {name}: runs side by side have one {why}; train them one after another instead."
                )
    several = {**values, **({} if count is None else {"seed": tuple(_seeds(wanted, count))})}
    found = {}
    for combination in itertools.product(*several.values()):
        changes = dict(zip(several, combination, strict=True))
        name = ",".join(f"{option}={_short(value)}" for option, value in changes.items())
        if name in found:
            raise ConfigError(
                f"--vary gives two runs the name {name}; let their values differ in the last part of a path."
            )
        found[name] = typed(changes, types)
    return found


def _short(value: Any) -> str:
    """A value as part of a folder's name: of a path its end."""
    return (
        (f"{value:g}" if isinstance(value, float) else str(value))
        .replace("\\", "/")
        .rsplit("/", 1)[-1]
        .replace(":", "-")
    )


def _alone(options: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """The flags of `covey train` for one of the runs."""
    mine = {name: value for name, value in options.items() if name not in NEVER}
    return {**mine, "output_dir": str(place), "resume": "auto"}


def _refuse(runs: Mapping[str, Given], options_of: Callable[[Given], dict[str, Any]]) -> None:
    """Raise ConfigError, before anything is loaded, where a run is wrong or cannot share the process."""
    from covey.config import GRPOConfig
    from covey.rewards import resolve
    from covey.training.together import refuse_unshareable

    configs = []
    for name, options in runs.items():
        if options.get("lora_r") is None:
            raise ConfigError("Only adapters share a base: give --lora-r, the rank of the adapters.")
        adapter(options)
        try:
            configs.append(GRPOConfig(**options_of(options)))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        for reward in options.get("reward") or ():
            resolve(reward)
    refuse_unshareable(configs)


def _told(name: str, error: Exception, folder: Path) -> int:
    """The exit code of a failure that the other runs outlive."""
    log = folder / f"{name}.log"
    with log.open("a") as file:
        traceback.print_exception(error, file=file)
    output.say(f"warning: {name} failed: {error} ({log}). The other runs go on; the same command tries it again.")
    return error.exit_code if isinstance(error, CoveyError) else 1


def _number(name: str) -> int:
    return int(name.removeprefix("seed-"))


def _report(folder: Path, results: Results, given: Given) -> None:
    if given.get("json"):
        output.result_json({"run": str(folder), "runs": results})
        return
    if not results:
        output.result(f"no run ended: {folder}")
        return
    names = seeds.shown_metrics([result["metrics"] for result in results.values()])
    width = max(map(len, results)) + 2
    output.result(f"{'run':<{width}}{'steps':>7}  " + "  ".join(f"{name:>18}" for name in names))
    for name, result in results.items():
        values = "  ".join(f"{seeds.number_of(result['metrics'].get(metric)):>18.4g}" for metric in names)
        output.result(f"{name:<{width}}{result['steps']:>7}  {values}")
    seeds.say_if_not_held_out(names)
