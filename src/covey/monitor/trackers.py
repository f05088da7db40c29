"""What transformers' tracker callbacks leave to be done: one tracker run for one run, over all its resumes, and alerts in it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from covey.monitor.watch import lines_of
from covey.types import Alert

logger = logging.getLogger(__name__)

TAG = "covey.run"
"""The tag of an MLflow run that holds the id of `run.json`."""
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
_LONGEST = 5000
"""Characters that MLflow takes in a tag."""


class Trackers(TrainerCallback):
    """Stands in front of the trackers' own callbacks, which start a new run at every start of training.

    W&B and Trackio get a name or an id that is the same after a resume; MLflow's run is found by its tag and opened again.
    As an outlet of alerts: `wandb.alert` and `trackio.alert`, a tag of the MLflow run, a text in TensorBoard. What a tracker
    raises is a warning, and training goes on.
    """

    def __init__(self, names: str | Sequence[str] | None, callbacks: Sequence[Any] = ()) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names or ())
        self.callbacks = callbacks
        self.run_id = ""
        """The id of `run.json`; empty: nothing is written down, and no tracker's run is chosen."""
        self._name_made: str | None = None
        self._mlflow_run: str | None = None

    def theirs(self) -> list[Any]:
        """The classes of transformers' callbacks for these names; once training goes, what they raise is a warning."""
        from transformers.integrations import get_reporting_integration_callbacks  # brings every model's code along

        return [_guarded(kind) for kind in get_reporting_integration_callbacks(list(self.names))]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the trackers' own callbacks hear of it."""
        if not (self.run_id and state.is_world_process_zero):
            return
        if args.run_name is None or args.run_name == self._name_made:
            self._name_made = args.run_name = f"{Path(args.output_dir).resolve().name}-{self.run_id[:8]}"
        if "wandb" in self.names:
            self._open_wandb(args)
        if "mlflow" in self.names:
            self._open_mlflow(args)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation after the end of training still belongs to the run."""
        if self._mlflow_run and sys.modules["mlflow"].active_run() is None:
            sys.modules["mlflow"].start_run(run_id=self._mlflow_run)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._mlflow_run and sys.modules["mlflow"].active_run() is not None:
            sys.modules["mlflow"].end_run()

    def __call__(self, alert: Alert) -> None:
        """Tell every tracker that is in use. Never raises."""
        text = "\n".join(lines_of(alert))
        for tell in (self._tell_wandb, self._tell_trackio, self._tell_mlflow, self._tell_tensorboard):
            try:
                tell(alert, text)
            except Exception as error:  # noqa: BLE001 - a tracker is somebody else's code and server
                name = tell.__name__.removeprefix("_tell_")
                logger.warning(
                    "%s did not take an alert (%s: %s); it is in alerts.jsonl.", name, type(error).__name__, error
                )

    def _open_wandb(self, args: Any) -> None:
        import wandb

        if wandb.run is None and not os.environ.get("WANDB_RUN_ID"):
            project = os.environ.get("WANDB_PROJECT", "huggingface")  # as transformers' callback would
            wandb.init(project=project, id=self.run_id, name=args.run_name, resume="allow")

    def _open_mlflow(self, args: Any) -> None:
        import mlflow

        before = mlflow.active_run()
        if before is not None and before.data.tags.get(TAG, self.run_id) != self.run_id:
            mlflow.end_run("FAILED")  # of an earlier training in this process, which could not end it
        if mlflow.active_run() is not None or os.environ.get("MLFLOW_RUN_ID"):
            return
        if experiment := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
            mlflow.set_experiment(experiment)
        same = mlflow.search_runs(filter_string=f"tags.`{TAG}` = '{self.run_id}'", output_format="list", max_results=1)
        known = same[0].info.run_id if same else None
        opened = mlflow.start_run(run_id=known, run_name=args.run_name, tags={TAG: self.run_id})
        self._mlflow_run = opened.info.run_id

    def _tell_wandb(self, alert: Alert, text: str) -> None:
        wandb = sys.modules.get("wandb")
        run = getattr(wandb, "run", None)
        if run is not None:
            run.alert(title=f"{alert.rule} at step {alert.step}", text=text, level=_LEVELS[alert.severity])

    def _tell_trackio(self, alert: Alert, text: str) -> None:
        if "trackio" in self.names:
            import trackio

            level = trackio.AlertLevel[_LEVELS[alert.severity]]
            trackio.alert(title=f"{alert.rule} at step {alert.step}", text=text, level=level)

    def _tell_mlflow(self, alert: Alert, text: str) -> None:
        if "mlflow" in self.names and sys.modules["mlflow"].active_run() is not None:
            sys.modules["mlflow"].set_tag(f"alert.{alert.rule}", text[:_LONGEST])

    def _tell_tensorboard(self, alert: Alert, text: str) -> None:
        for callback in self.callbacks:
            writer = getattr(callback, "tb_writer", None)
            if writer is not None:
                writer.add_text(f"alerts/{alert.rule}", text.replace("\n", "  \n"), alert.step)
                writer.flush()


_GUARDED = ("on_step_end", "on_log", "on_evaluate", "on_save", "on_predict", "on_train_end")
"""Not `on_train_begin`: a tracker that cannot be set up is told before work is spent."""


def _guarded(kind: type) -> type:
    """A subclass of a tracker's callback: a server that is away for an hour does not end a run of days."""

    def guard(event: str) -> Callable[..., Any]:
        def heard(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            try:
                return getattr(kind, event)(self, args, state, control, **kwargs)
            except Exception as error:  # noqa: BLE001 - a tracker is somebody else's code and server
                logger.warning(
                    "%s failed in %s at step %d (%s: %s); training goes on, and metrics.jsonl has every number.",
                    kind.__name__, event, state.global_step, type(error).__name__, error,
                )  # fmt: skip
                return control

        return heard

    return type(kind.__name__, (kind,), {event: guard(event) for event in _GUARDED if hasattr(kind, event)})
