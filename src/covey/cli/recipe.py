"""`--recipe NAME`: options that go together, below those of the file and the flags.

A recipe is a few options that were measured together, or a YAML file of this package for a model on given hardware. The
file's first lines are comments: a title, then facts such as `# gpus: H100`.
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag, read_yaml, spelled
from covey.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fast": {"num_iterations": 4, "target_kl": 0.02, "curriculum": "frontier"},
}
"""Options that each sets; docs/sample-efficiency.md has the measurements."""
_PLANNED = ("gpus", "prompt_tokens", "mean_completion_tokens")
"""Facts that are options of `covey doctor plan`."""


@dataclass(frozen=True)
class Recipe:
    """A YAML file of options for one model and one machine, and the facts of its head."""

    path: Path
    title: str
    facts: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def gpus(self) -> int:
        count = re.match(r"(\d+)x", self.facts["gpus"])
        return int(count[1]) if count else 1

    @property
    def processes(self) -> int:
        """Processes of a launch: one a GPU, but for asynchronous rollouts on a GPU of their own."""
        return 1 if "-async-" in self.name else self.gpus

    @property
    def launch(self) -> str:
        """The command that starts it."""
        train = f"covey train --recipe {self.name}"
        nodes, rest = divmod(self.processes, 8)
        if self.processes == 1:
            return train
        many = f"--nnodes {nodes} " if nodes > 1 and not rest else ""
        return f"torchrun {many}--nproc-per-node {min(8, self.processes)} -m {train}"


@functools.cache
def recipes() -> Mapping[str, Recipe]:
    """Every recipe for one model and one machine, by name."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.yaml"))}


def _read(path: Path) -> Recipe:
    head = [line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    return Recipe(path, head[0], {name: value for name, _, value in (line.partition(": ") for line in head[1:])})


def nearest(name: str) -> str:
    """Hint with the recipe that shares the longest prefix with the name, else the nearest spelling; empty for none near."""
    names = [*RECIPES, *recipes()]
    best = max(names, key=lambda other: (_common(name, other), -len(other)))
    return f" Did you mean {best}?" if _common(name, best) > 8 else did_you_mean(name, names)


def _common(first: str, second: str) -> int:
    """Characters that both begin with."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def expanded(
    args: Mapping[str, Any], flags: Iterable[Flag] = (), hints: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The options, completed by those of their recipe. Raises ConfigError for an unknown recipe."""
    options = dict(args)
    name = options.pop("recipe", None)
    if name is None:
        return options
    if name in recipes():
        return _with_file(options, recipes()[name], list(flags), hints or {})
    if name not in RECIPES:
        names = [*RECIPES, *recipes()]
        raise ConfigError(f"--recipe {name} is unknown.{nearest(name)} `covey recipes` lists all {len(names)}.")
    added = {option: value for option, value in RECIPES[name].items() if option not in options}
    yours = [spelled(option) for option in RECIPES[name] if option in options]
    words = " ".join(f"{spelled(option)} {value}" for option, value in added.items())
    also = f"; yours: {', '.join(yours)}" if yours else ""
    output.say(f"recipe {name}: {words or 'sets nothing that you have not set'}{also}")
    return {**added, **options}


def _with_file(args: dict[str, Any], recipe: Recipe, flags: Sequence[Flag], hints: Mapping[str, str]) -> dict[str, Any]:
    names = {flag.name for flag in flags}
    options = read_yaml(recipe.path, flags, hints)
    options |= {name: recipe.facts[name] for name in _PLANNED if name in names}
    output.say_on_main(f"recipe {recipe.name}: {recipe.title}; planned, not measured")
    trains = "gpus" not in names and not (args.get("dry_run") or args.get("print_config"))
    if trains and int(os.environ.get("WORLD_SIZE", "1") or 1) == 1:
        refuse_wrong_machine(recipe, _gpus_here(), "max_tokens_per_microbatch" in args)
    return {**options, **args}


def _gpus_here() -> list[int]:
    """Memory of each GPU that PyTorch sees, in bytes."""
    import torch

    return [torch.cuda.get_device_properties(at).total_memory for at in range(torch.cuda.device_count())]


def refuse_wrong_machine(recipe: Recipe, memory: Sequence[int], has_limit: bool = False) -> None:
    """Raise ConfigError where the recipe cannot run in this one process: no GPU, too little memory, or more processes.

    `memory`: bytes of each GPU here. `has_limit`: the user has limited the micro-batch, which the plan does not know.
    """
    if not memory:
        raise ConfigError(
            f"--recipe {recipe.name} is for {recipe.facts['gpus']}, and PyTorch sees no GPU here; run it there, or plan it "
            f"here: covey doctor plan --recipe {recipe.name}."
        )
    if recipe.processes > 1:
        raise ConfigError(f"--recipe {recipe.name} needs {recipe.processes} processes: {recipe.launch}")
    if recipe.gpus > len(memory):
        raise ConfigError(f"--recipe {recipe.name} is for {recipe.facts['gpus']}, and there is {len(memory)} GPU here.")
    peak = float(recipe.facts["planned_peak_gib"])
    if peak * 2**30 > memory[0] and not has_limit:
        raise ConfigError(
            f"--recipe {recipe.name} needs {peak:g} GiB, and the GPU here has {memory[0] / 2**30:.0f} GiB; `covey recipes` "
            "lists smaller ones, or set --max-tokens-per-microbatch 8192."
        )
