"""`covey train --adapters N`, `--vary NAME=A,B`, `--seeds N --share-base`: several adapters on one base, in one process."""

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from covey.cli import output, seeds
from covey.cli.adapter import adapter
from covey.cli.flags import Flag, typed
from covey.cli.verb import Args
from covey.errors import ConfigError
from covey.experiments import child, series
from covey.experiments.search import choices
from covey.experiments.several import OF_THE_BASE, OF_THE_DATA, OF_THE_PROCESS, Book, Steps


def shares_base(args: Args) -> bool:
    """True if the flags ask for several adapters on one base."""
    return any(args.get(name) for name in ("vary", "share_base")) or args.get("adapters") is not None


def run(
    args: Args,
    overrides: Mapping[str, Any],
    cli_args: Mapping[str, Any],
    options_of: Callable[[Args], dict[str, Any]],
    member_of: Callable[[Args, Any], Steps],
    flags: Mapping[str, Flag],
    types: Mapping[str, Any],
) -> int:
    """Train every run that has not ended yet, a step of each in turn, and show them all.

    The same command continues an interrupted one. Returns the exit code of the first run that failed, else 0.
    `options_of` gives the options of GRPOConfig, `member_of` a run to train on a base.
    """
    import yaml

    from covey.cli.plan import as_yaml
    from covey.experiments.interleaving import Member, interleave
    from covey.models import SharedBase
    from covey.runs.lock import FolderLock
    from covey.runs.signals import StopRequest

    folder = Path(str(overrides["output_dir"])).expanduser()
    runs = {
        name: {**cli_args, **overrides, **changes} for name, changes in _runs(args, overrides, flags, types).items()
    }
    runs = {name: _alone(options, folder / name) for name, options in runs.items()}
    _refuse(runs, options_of)
    settings = {name: value for name, value in cli_args.items() if name not in series.NEVER or name == "vary"}
    rest = {name: value for name, value in overrides.items() if name not in {"seed", *series.NEVER}}
    series.claim(folder, yaml.safe_load(as_yaml(rest, settings)), "several runs")
    book = Book(folder, is_seeds=not args.get("vary"), say=output.say)
    base = SharedBase(args["model"])
    with FolderLock(folder):
        for name in (waiting := [name for name in runs if name not in book.results]):
            series.make_way(folder / name)
        output.say(f"{len(waiting)} runs on one base, a step of each in turn: {', '.join(waiting) or 'all have ended'}")
        with StopRequest() as stop, stop.for_all():
            interleave([Member(name, member_of(runs[name], base)) for name in waiting], book.ended)
    if stop.requested:
        output.say(f"Stopped; every run has its checkpoint. Go on with: {series.again(sys.argv, folder)}")
        return stop.exit_code
    seeds.report(book, runs, args)
    return next(iter(book.failed.values()), 0)


def _runs(
    args: Args, overrides: Mapping[str, Any], flags: Mapping[str, Flag], types: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Options that each run changes, by its name. Raises ConfigError for flags that do not go together."""
    child.refuse_launcher("--vary" if args.get("vary") else "--share-base")
    if args.get("resume") not in (None, "never", "auto"):
        raise ConfigError("Runs on one base go on by themselves where they stopped; leave --resume out.")
    if args.get("streaming"):
        raise ConfigError("Runs on one base read the same rows; leave --streaming out.")
    count, adapters = args.get("seeds"), args.get("adapters")
    if count is not None and adapters is not None:
        raise ConfigError("--adapters N is short for --seeds N --share-base; keep one of them.")
    count = count if adapters is None else adapters
    if args.get("vary"):
        return _vary(args, overrides, count, flags, types)
    if count is None:
        raise ConfigError("--share-base is missing what to train: --seeds N, or --vary NAME=A,B.")
    return {f"seed-{seed}": {"seed": seed} for seed in seeds.numbers(overrides, count)}


def _vary(
    args: Args, overrides: Mapping[str, Any], count: int | None, flags: Mapping[str, Flag], types: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Every combination of the values, with each seed where there are several."""
    values = choices(args["vary"], {name: flag.kind for name, flag in flags.items()}, "--vary")
    for name in values:
        for why, names in (("base", OF_THE_BASE), ("data set", OF_THE_DATA), ("process", OF_THE_PROCESS)):
            if name in names:
                raise ConfigError(
                    f"--vary {name}: runs side by side have one {why}; train them one after another instead."
                )
    several = {**values, **({} if count is None else {"seed": tuple(seeds.numbers(overrides, count))})}
    runs = {}
    for combination in itertools.product(*several.values()):
        changes = dict(zip(several, combination, strict=True))
        name = ",".join(f"{option}={_short(value)}" for option, value in changes.items())
        if name in runs:
            raise ConfigError(
                f"--vary gives two runs the name {name}; let their values differ in the last part of a path."
            )
        runs[name] = typed(changes, types)
    return runs


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
    mine = {name: value for name, value in options.items() if name not in series.NEVER}
    return {**mine, "output_dir": str(place), "resume": "auto"}


def _refuse(runs: Mapping[str, Args], options_of: Callable[[Args], dict[str, Any]]) -> None:
    """Raise ConfigError, before anything is loaded, where a run is wrong or cannot share the process."""
    from covey.config import GRPOConfig
    from covey.experiments.together import refuse_unshareable
    from covey.rewards import resolve

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
