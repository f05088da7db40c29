"""Several runs on one base in this process: which options they may not vary, how each ended, and their file of results."""

import json
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.experiments import seeds

RESULTS = "together.json"
"""File of final results by run, in the folder of runs that vary options."""
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
    """Results of the runs of a folder, in memory and in its file; seeds as `covey train --seeds` writes them, so that
    either goes on with the other's."""

    def __init__(self, folder: Path, is_seeds: bool, say: Callable[[str], None]) -> None:
        self.folder, self.is_seeds, self.say = folder, is_seeds, say
        self.failed: dict[str, int] = {}
        """Exit code by run."""
        path = folder / (seeds.RESULTS if is_seeds else RESULTS)
        recorded = json.loads(path.read_text()) if path.is_file() else {}
        self.results: Results = {f"seed-{name}" if is_seeds else name: result for name, result in recorded.items()}

    def ended(self, member: Any) -> None:
        """Write down how this `Member` has ended; one that was stopped is not over."""
        if member.error is not None:
            self.failed[member.name] = self._failed(member.name, member.error)
        elif not member.result.stopped_by:
            metrics = dict(member.result.metrics)
            self.results[member.name] = {
                "run": str(self.folder / member.name), "steps": member.result.steps, "seconds": metrics["train_runtime"],
                "metrics": metrics,
            }  # fmt: skip
            self._write()

    def _write(self) -> None:
        from covey.runs.storage import write_atomically

        if self.is_seeds:
            seeds.write(self.folder, {number_of_seed(name): result for name, result in self.results.items()})
        else:
            write_atomically(self.folder / RESULTS, json.dumps(self.results, indent=1).encode())

    def _failed(self, name: str, error: Exception) -> int:
        """The exit code of a failure that the other runs outlive."""
        log = self.folder / f"{name}.log"
        with log.open("a") as file:
            traceback.print_exception(error, file=file)
        self.say(f"warning: {name} failed: {error} ({log}). The other runs go on; the same command tries it again.")
        return error.exit_code if isinstance(error, CoveyError) else 1


def number_of_seed(name: str) -> int:
    """3 of `seed-3`."""
    return int(name.removeprefix("seed-"))
