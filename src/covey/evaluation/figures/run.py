"""A run folder as an object: `run = covey.Run("runs/a")`, then `run.plot()`, `run.report("report.html")`, or the run itself in a notebook."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import RunFolderError
from covey.evaluation.compare import run_data
from covey.evaluation.figures.draw import as_svg
from covey.evaluation.figures.gather import figures_of, last_values, step_of
from covey.evaluation.figures.picture import Picture
from covey.evaluation.html import table
from covey.files.places import expect_path
from covey.runs import metrics, rollouts


class Run:
    """A run folder; every access reads the files again, so the run may still be training.

    Raises RunFolderError for a folder that is no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = expect_path("path", path)
        runs = run_data.read_runs(str(self.path))
        if len(runs) > 1 or runs[0].path != self.path:
            names = ", ".join(str(run.path) for run in runs[:3])
            raise RunFolderError(
                f"{path} holds runs and is none itself; give one of {names}, or use covey.plot({str(path)!r})."
            )

    def _read(self) -> run_data.Run:
        return run_data.read_runs(str(self.path))[0]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def manifest(self) -> Mapping[str, Any]:
        """`run.json`, with the state that the run really is in."""
        return self._read().manifest

    @property
    def state(self) -> str:
        """running, finished, failed, died, ..."""
        return str(self.manifest.get("state", "unknown"))

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved options."""
        return self._read().config

    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """`metrics.jsonl`: one mapping a step; `pandas.DataFrame(run.metrics)` makes a table of it."""
        return self._read().curve

    @property
    def evaluations(self) -> Mapping[str, Mapping[int, Mapping[str, Any]]]:
        """`evaluations.jsonl`: metrics by set and step."""
        return self._read().evaluated

    @property
    def alerts(self) -> Sequence[Mapping[str, Any]]:
        """`alerts.jsonl`, in order."""
        return list(metrics.iterate(self.path / "alerts.jsonl"))

    @property
    def rollout_steps(self) -> Sequence[int]:
        """Steps whose completions are kept."""
        return rollouts.steps(self.path / "rollouts")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The completions of a step, a mapping each. RunFolderError for a step that was not kept, with those that were."""
        if step not in self.rollout_steps:
            raise RunFolderError(
                f"{self.path} kept no completions of step {step}; it has {_brief(self.rollout_steps)}."
            )
        return rollouts.read(rollouts.path_of(self.path / "rollouts", step))

    def plot(self, *names: str) -> Picture:
        """Figures of these metrics, or the usual ones. Raises ConfigError for a metric that the run does not have."""
        return Picture(*figures_of([self._read()], names))

    def report(self, path: str | Path) -> Path:
        """Write the run as one page to share; as `covey report`."""
        from covey.evaluation.figures.report import write_report

        return write_report(self.path, Path(path))

    def _repr_html_(self) -> str:
        run = self._read()
        rows: list[tuple[object, ...]] = [("state", run.manifest.get("state")), ("step", step_of(run))]
        rows += [(name, f"{value:.4g}") for name, value in last_values(run).items()]
        rows += [("alerts", len(self.alerts)), ("folder", self.path)]
        try:
            titles, figures = figures_of([run])
        except RunFolderError:  # nothing is recorded yet
            figures, titles = [], []
        drawn = "".join(
            f'<div style="flex:1 1 22rem;max-width:34rem">{as_svg(figure, titles)}</div>' for figure in figures[:2]
        )
        left = table([(self.name, ""), *rows])
        return f'<div style="display:flex;flex-wrap:wrap;gap:1.5rem;align-items:flex-start">{left}{drawn}</div>'

    def __repr__(self) -> str:
        run = self._read()
        values = ", ".join(f"{name} {value:.3g}" for name, value in last_values(run).items())
        return (
            f"Run({str(self.path)!r}: {run.manifest.get('state')}, step {step_of(run)}{', ' if values else ''}{values})"
        )


def _brief(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    many = f"{len(steps)} from {steps[0]} to {steps[-1]}, such as {steps[-2]}" if len(steps) > 8 else ""
    return many or ", ".join(map(str, steps))
