"""Several runs of a folder: which options runs on one base may not vary, how each ended, and their file of results."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.errors import CoveyError
from covey.experiments.attempt import number_of

if TYPE_CHECKING:
    from covey.evaluation.intervals import Estimate

OF_THE_BASE = frozenset({"model", "dtype", "model_init_kwargs", "trust_remote_code"})
OF_THE_DATA = frozenset(
    {
        "dataset", "prompt_column", "answer_column", "columns", "system_prompt", "dataset_config", "streaming",
        "max_prompts",
    }
)  # fmt: skip
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


Steps = Generator[None, None, Outcome]
Results = dict[str, dict[str, Any]]


class Book:
    """Results of the runs of a folder, in memory and in its file, where the run `seed-3` of several seeds is 3."""

    def __init__(self, folder: Path, is_seeds: bool, say: Callable[[str], None]) -> None:
        self.folder, self.is_seeds, self.say = folder, is_seeds, say
        self.failed: dict[str, int] = {}
        """Exit code by run."""
        self._path = folder / ("seeds.json" if is_seeds else "together.json")
        recorded = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self.results: Results = {f"seed-{name}" if is_seeds else name: result for name, result in recorded.items()}

    def of(self, names: Iterable[str]) -> Results:
        """Results of those runs that have ended, as the file names them."""
        ended = {name: self.results[name] for name in names if name in self.results}
        return {name.removeprefix("seed-") if self.is_seeds else name: result for name, result in ended.items()}

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """Write down what a run has ended with."""
        from covey.runs.storage import write_atomically

        self.results[name] = dict(result)
        write_atomically(self._path, json.dumps(self.of(self.results), indent=1).encode())

    def ended(self, member: Any) -> None:
        """Write down how this `Member` has ended; one that was stopped is not over."""
        if member.error is not None:
            self.failed[member.name] = self._failed(member.name, member.error)
        elif not member.result.stopped_by:
            metrics = dict(member.result.metrics)
            self.add(member.name, {
                "run": str(self.folder / member.name), "steps": member.result.steps, "seconds": metrics["train_runtime"],
                "metrics": metrics,
            })  # fmt: skip

    def _failed(self, name: str, error: Exception) -> int:
        """The exit code of a failure that the other runs outlive."""
        log = self.folder / f"{name}.log"
        with log.open("a") as file:
            traceback.print_exception(error, file=file)
        self.say(f"warning: {name} failed: {error} ({log}). The other runs go on; the same command tries it again.")
        return error.exit_code if isinstance(error, CoveyError) else 1


def summary(results: Mapping[Any, Mapping[str, Any]]) -> dict[str, Estimate]:
    """Mean and Student's 95% interval over seeds of what each ended with: held-out rewards, or the last training reward."""
    from covey.evaluation.intervals import mean_of_seeds

    names = shown_metrics([result["metrics"] for result in results.values()])
    values = {name: [number_of(result["metrics"].get(name)) for result in results.values()] for name in names}
    return {name: mean_of_seeds(several) for name, several in values.items()}


def shown_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """`eval_reward` and the mean of each reward on held-out prompts; `reward` where nothing was evaluated."""
    names = sorted(set().union(*metrics)) if metrics else []
    held_out = [name for name in names if name.startswith("eval_rewards/") and name.endswith("/mean")]
    return ["eval_reward", *(held_out if len(held_out) > 1 else [])] if "eval_reward" in names else ["reward"]
