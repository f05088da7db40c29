"""Additions to transformers' tracker callbacks: one tracker run over all resumes, alerts in it, and calls off the training thread."""

import atexit
import copy
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from covey.config.trackers import refuse_absent_trackers
from covey.monitor.call_queue import CallQueue, nothing
from covey.monitor.watch import lines_of
from covey.process.lean import TrainerCallback
from covey.types import Alert

logger = logging.getLogger(__name__)

TAG = "covey.run"
"""The tag of an MLflow run that holds the id of `run.json`."""
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
_TABLES = {"wandb": "WandbCallback", "trackio": "TrackioCallback"}
"""Trackers that keep tables, and their callbacks."""
_LONGEST = 5000
"""Characters that MLflow takes in a tag."""


class Trackers(TrainerCallback):
    """Proxy of the trackers' callbacks, which would start a new run whenever training starts.

    W&B and Trackio get a name or an id that is the same after a resume; MLflow's run is found by its tag and opened again.
    As an outlet of alerts: `wandb.alert` and `trackio.alert`, a tag of the MLflow run, a text in TensorBoard.

    While training goes on, each tracker is called on a thread of its own (`CallQueue`), so none holds up a step. A tracker's
    exception is a warning, and training goes on. Before and after training, trackers are called synchronously.
    """

    def __init__(self, names: str | Sequence[str] | None, callbacks: Callable[[], Sequence[Any]] = tuple) -> None:
        """`callbacks` returns the run's callbacks; the TensorBoard callback's writer also receives alerts."""
        self.names = (names,) if isinstance(names, str) else tuple(names or ())
        self.callbacks = callbacks
        self.run_id = ""
        """The id of `run.json`; empty: nothing is written down, and no tracker's run is chosen."""
        self.patience_seconds = 60.0
        """Seconds after which a tracker's call is reported as slow, and after which the end of a run no longer waits for it."""
        self.is_hurried: Callable[[], bool] = lambda: False
        """True if a signal asked the run to end: trackers then get at most `patience_seconds` in all."""
        self.lanes: dict[str, CallQueue] = {}
        """Queues by the name of the tracker's callback class."""
        self.is_training = False
        self._name_made: str | None = None
        self._mlflow_run: str | None = None

    def theirs(self) -> list[Any]:
        """The classes of transformers' callbacks for these names; during training their exceptions become warnings."""
        from transformers.integrations import get_reporting_integration_callbacks  # brings every model's code along

        refuse_absent_trackers(self.names)
        return [_guard(kind, self) for kind in get_reporting_integration_callbacks(list(self.names))]

    def follow(self, run_id: str, is_hurried: Callable[[], bool]) -> None:
        """Attach the next training to the tracker run of this id; `is_hurried` returns whether a signal asked it to end."""
        self.run_id, self.is_hurried = run_id, is_hurried

    def lane(self, tracker: str) -> CallQueue:
        """The line in which this tracker's calls wait."""
        if tracker not in self.lanes:
            prepare = _same_mlflow_run if tracker in _OF_A_THREAD else lambda: nothing
            self.lanes[tracker] = CallQueue(tracker, prepare=prepare, patience_seconds=self.patience_seconds)
        return self.lanes[tracker]

    def hand_over(self, tracker: str, what: str, call: Callable[[], object]) -> None:
        """Make a call to a tracker: through its queue during training, else on this thread. Never raises."""
        lane = self.lane(tracker)
        if self.is_training:
            lane.put(what, call)
        elif lane.is_idle:  # otherwise it is still stuck in a call of the earlier training, already reported
            lane.call(what, call)

    def close(self) -> None:
        """End of training, successful or not: drain the trackers' queues while they make progress."""
        self.is_training = False
        for lane in self.lanes.values():
            lane.close(self._longest())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the trackers' own callbacks hear of it."""
        self.is_training = True
        if not (self.run_id and state.is_world_process_zero):
            return
        if args.run_name is None or args.run_name == self._name_made:
            self._name_made = args.run_name = f"{Path(args.output_dir).resolve().name}-{self.run_id[:8]}"
        if "wandb" in self.names:
            with self.warn_when_slow("W&B"):
                self._open_wandb(args)
        if "mlflow" in self.names:
            with self.warn_when_slow("MLflow"):
                self._open_mlflow(args)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation after the end of training still belongs to the run."""
        if self._mlflow_run and sys.modules["mlflow"].active_run() is None:
            sys.modules["mlflow"].start_run(run_id=self._mlflow_run)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the trackers' own callbacks hear of it: they have taken everything, or will not."""
        has_taken = {tracker: lane.flush(self._longest()) for tracker, lane in self.lanes.items()}
        if (
            self._mlflow_run
            and has_taken.get("MLflowCallback", True)
            and sys.modules["mlflow"].active_run() is not None
        ):
            sys.modules["mlflow"].end_run()

    def __call__(self, alert: Alert) -> None:
        """Send an alert to every tracker in use. Never raises."""
        text = "\n".join(lines_of(alert))
        for tracker, tell in self._in_use():
            self.hand_over(tracker, f"an alert at step {alert.step}", partial(_send_alert, tell, alert, text))

    @property
    def takes_tables(self) -> bool:
        return not _TABLES.keys().isdisjoint(self.names)

    def send_completions(self, step: int, frame: Any) -> None:
        """Send a DataFrame to W&B and Trackio as the table `completions`, under TRL's name. Never raises."""
        for name in _TABLES.keys() & self.names:
            what = f"the completions at step {step}"
            self.hand_over(_TABLES[name], what, partial(_log_table, name, step, frame))

    @contextmanager
    def warn_when_slow(self, tracker: str) -> Iterator[None]:
        """Context manager for a tracker's set-up, which training waits for so that a failure comes early; logs its name when slow."""
        sentence = (
            f"{tracker} has been starting for {self.patience_seconds:.0f} seconds; training begins when it is done."
        )
        timer = threading.Timer(self.patience_seconds, logger.warning, [sentence])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _longest(self) -> float:
        """Seconds that the end of a run waits for a slow tracker that still makes progress."""
        return self.patience_seconds if self.is_hurried() else 10 * self.patience_seconds

    def _in_use(self) -> Iterator[tuple[str, Callable[[Alert, str], None]]]:
        if getattr(sys.modules.get("wandb"), "run", None) is not None:
            yield "WandbCallback", self._tell_wandb
        if "trackio" in self.names:
            yield "TrackioCallback", self._tell_trackio
        if "mlflow" in self.names:
            yield "MLflowCallback", self._tell_mlflow
        if any(getattr(callback, "tb_writer", None) is not None for callback in self.callbacks()):
            yield "TensorBoardCallback", self._tell_tensorboard

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
        run_id = same[0].info.run_id if same else None
        opened = mlflow.start_run(run_id=run_id, run_name=args.run_name, tags={TAG: self.run_id})
        self._mlflow_run = opened.info.run_id
        atexit.register(hurry_mlflow, self.lane("MLflowCallback"))  # before MLflow's own exit, registered earlier

    def _tell_wandb(self, alert: Alert, text: str) -> None:
        if (run := sys.modules["wandb"].run) is not None:
            run.alert(title=f"{alert.rule} at step {alert.step}", text=text, level=_LEVELS[alert.severity])

    def _tell_trackio(self, alert: Alert, text: str) -> None:
        import trackio

        level = trackio.AlertLevel[_LEVELS[alert.severity]]
        trackio.alert(title=f"{alert.rule} at step {alert.step}", text=text, level=level)

    def _tell_mlflow(self, alert: Alert, text: str) -> None:
        if sys.modules["mlflow"].active_run() is not None:
            sys.modules["mlflow"].set_tag(f"alert.{alert.rule}", text[:_LONGEST])

    def _tell_tensorboard(self, alert: Alert, text: str) -> None:
        for callback in self.callbacks():
            writer = getattr(callback, "tb_writer", None)
            if writer is not None:
                writer.add_text(f"alerts/{alert.rule}", text.replace("\n", "  \n"), alert.step)
                writer.flush()


def _log_table(name: str, step: int, frame: Any) -> None:
    tracker: Any = sys.modules[name]
    if name != "wandb" or tracker.run is not None:
        tracker.log({"completions": tracker.Table(dataframe=frame), "train/global_step": step})


def _send_alert(tell: Callable[[Alert, str], None], alert: Alert, text: str) -> None:
    try:
        tell(alert, text)
    except Exception as error:  # noqa: BLE001 - a tracker is third-party code with a server
        name = getattr(tell, "__name__", "").removeprefix("_tell_")
        logger.warning("%s did not take an alert (%s: %s); it is in alerts.jsonl.", name, type(error).__name__, error)


_GUARDED = ("on_step_end", "on_log", "on_evaluate", "on_save", "on_predict", "on_train_end")
"""Not `on_train_begin`, which runs synchronously so that a failed set-up is reported before work is spent."""
_OF_TRAINING = frozenset({"optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"})
"""Keyword arguments that training mutates and no tracker reads; they are not passed on."""
_OF_A_THREAD = frozenset({"MLflowCallback", "DagsHubCallback"})
"""Callbacks whose tracker run is bound to the thread that began it."""
_ENDS_WHERE_IT_BEGAN = _OF_A_THREAD | {"TrackioCallback"}
_UPLOADS: dict[str, Callable[[Any], bool]] = {
    "WandbCallback": lambda callback: bool(callback._log_model.is_enabled),
    "MLflowCallback": lambda callback: bool(getattr(callback, "_log_artifacts", True)),
    "TrackioCallback": lambda callback: False,
}
"""Trackers that listen to every save but read the folder only where uploads are switched on."""

_UPLOAD_SECONDS = 1800.0
"""Seconds that a step waits for the upload of a checkpoint."""


def reads_checkpoints(callback: Any) -> bool:
    """True if a callback expects the checkpoint to be on disk when its `on_save` is called."""
    if type(callback).on_save is TrainerCallback.on_save:
        return False
    uploads = _UPLOADS.get(type(callback).__name__)
    return True if uploads is None else uploads(callback)


def _guard(kind: type, trackers: Trackers) -> type:
    """A subclass of a tracker's callback: a server that is away for an hour neither ends nor holds up a run of days."""
    name = kind.__name__

    def guard(event: str) -> Callable[..., Any]:
        def heard(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            # trackers warn about metrics that have no value
            defined = lambda value: (
                {n: v for n, v in value.items() if v is not None} if isinstance(value, dict) else value
            )
            arguments = {key: defined(value) for key, value in kwargs.items() if key not in _OF_TRAINING}
            now = copy.copy(state), copy.copy(control)  # training continues with its own
            call = partial(getattr(kind, event), self, args, *now, **arguments)
            what = f"{event} at step {state.global_step}"
            lane = trackers.lane(name)
            if event == "on_train_end" and not lane.is_idle:
                return control  # stuck in an earlier call, which `Trackers.on_train_end` has reported
            if event == "on_train_end" and name in _ENDS_WHERE_IT_BEGAN:
                lane.call(what, call)
                return control
            trackers.hand_over(name, what, call)
            if event == "on_save" and trackers.is_training and reads_checkpoints(self):
                lane.wait(_UPLOAD_SECONDS, _UPLOAD_SECONDS)  # a later save may delete the folder that it uploads
            return control

        return heard

    def on_train_begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        with trackers.warn_when_slow(name):
            kind.on_train_begin(self, args, state, control, **kwargs)  # type: ignore[attr-defined]
        if name in _OF_A_THREAD:
            self._async_log = False  # MLflow's own queue has no end, and the process waits for it at its exit

    heard = [event for event in _GUARDED if getattr(kind, event) is not getattr(TrainerCallback, event)]
    return type(name, (kind,), {"on_train_begin": on_train_begin, **{event: guard(event) for event in heard}})


def hurry_mlflow(lane: CallQueue) -> None:
    """At exit MLflow ends its run: ten seconds for a server that already holds a call up, not its quarter of an hour."""
    if not lane.is_idle:
        os.environ |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


def _same_mlflow_run() -> Callable[[], object]:
    """Set-up for another thread, so that it logs to this thread's MLflow run."""
    mlflow = sys.modules.get("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    return nothing if mlflow is None or run is None else partial(mlflow.start_run, run_id=run.info.run_id)
