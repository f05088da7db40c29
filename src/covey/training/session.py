"""Session: callbacks, logs, evaluation and checkpoints around the steps of the loop, which calls `record`."""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from covey.errors import ConfigError, RewardError, SpoiledError
from covey.monitor import Monitor, Progress
from covey.monitor.progress import evaluation_line
from covey.process.interruption import StopNow
from covey.runs import StopRequest
from covey.training.state import LOSSES, TrainState
from covey.types import Alert, Event, Group, Metric, StepReport, merge_metrics

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Writer of a run's records: the run folder on the main process, nothing on the others."""

    def step(self, report: StepReport, logs: Mapping[str, float], groups: Sequence[Group]) -> None: ...

    def evaluation(
        self, step: int, name: str, weights: Sequence[float], evaluate: Callable[..., dict[str, float]]
    ) -> dict[str, float]: ...

    def bad_step(self, step: int, groups: Sequence[Group], report: StepReport) -> None: ...

    def rewind(self, step: int, event: Event) -> None: ...

    def drop_evaluations(self, step: int) -> None: ...

    def event(self, step: int, event: Event) -> None: ...

    def reward_failed(self, step: int, error: RewardError) -> None: ...

    def close(self, outcome: Literal["finished", "stopped", "failed"]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(eq=False)
class Session:
    """transformers' callback protocol around Covey's loop. Holds no state of the algorithm."""

    args: Any
    handler: Any
    """transformers.trainer_callback.CallbackHandler"""
    trainer_state: Any
    control: Any
    recorder: Recorder
    display: Progress
    stop: StopRequest
    evaluate: Callable[[], Mapping[str, float]]
    save: Callable[[TrainState], None]
    steps_per_epoch: float
    check_weights: Callable[[], None] = lambda: None
    """Raises InvariantError if callbacks changed what is trained so that the run cannot follow."""
    monitor: Monitor = field(default_factory=Monitor)
    """Monitor with the alerts of the run; the default has none."""
    lower_learning_rate: Callable[[float], None] = lambda factor: None
    """Multiplies the learning rate of the current and all later steps."""
    show_completions: Callable[[int, Sequence[Group]], None] = lambda step, groups: None
    """Prints completions at each log; the default prints nothing."""
    poll_saving: Callable[[], None] = lambda: None
    """Handles the result of a finished checkpoint write, without waiting."""
    finish_saving: Callable[[], None] = lambda: None
    """Waits for the current checkpoint write."""
    finish_uploads: Callable[[], None] = lambda: None
    """Waits for uploads to the hub."""
    announce: Callable[[dict[str, float]], None] | None = None
    """First receiver of logs, such as a trainer's `log`, which calls this session's `log`; None: this session's `log`."""
    agree: Callable[[bool], bool] = lambda flag: flag
    """Logical or over processes: a signal reaches processes at different moments, or only some."""
    is_stop_requested: bool = False
    """True if a signal had reached any process by the end of the last step."""
    must_stop: bool = False
    """True if an alert on this process ends the run after this step."""
    roll_back_because: str | None = None
    """Reason for a rollback to a checkpoint after this step; None: no rollback."""
    window: dict[str, Metric] = field(default_factory=dict)
    """Metrics since the last log."""
    window_seconds: list[float] = field(default_factory=list)
    total_loss: float = 0.0
    last_saved: int = -1
    latest: TrainState = field(default_factory=TrainState)
    """State after the last complete step, for an emergency checkpoint."""
    started: float = field(default_factory=time.perf_counter)
    num_steps: int = 0
    """Steps since then, without those before a resume and with those that a rollback repeats."""
    is_epoch_stop_named: bool = False
    """True once a callback that ends an epoch early was warned that epochs are not ended."""
    late_options: frozenset[str] = frozenset({"run_name"})
    """Options that callbacks changed in the middle of the run, each warned of once; a run's name is the trackers' to set."""
    flos_per_token: float = 0.0
    """Floating-point operations of training on one token, for `total_flos`."""

    @property
    def should_stop(self) -> bool:
        return bool(self.is_stop_requested or self.control.should_training_stop)

    def ask_roll_back(self, why: str) -> None:
        """Request a rollback after this step to the newest good checkpoint, with a lower learning rate; for callbacks and alerts."""
        self.roll_back_because = why

    def resume_from(self, state: TrainState) -> None:
        """Continue a running session from a checkpoint that was just restored."""
        self.latest = state
        self.last_saved = state.step
        if self.trainer_state.global_step >= self.trainer_state.max_steps:
            self.control.should_training_stop = False  # set at the last step, which is to be repeated
        self.trainer_state.global_step = state.step
        self._count(state)
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        if state.is_evaluation_due:
            self._evaluate_again(state)
        self._hear_signals()
        if not self.should_stop:
            self._call("on_step_begin")

    def begin(self, state: TrainState) -> None:
        """Start of training: `on_train_begin`, and an initial evaluation if configured."""
        self.poll_saving()
        self.latest = state
        self.trainer_state.global_step = state.step
        self._count(state)
        self.started, self.num_steps = time.perf_counter(), 0
        self._call("on_train_begin")
        self._call("on_epoch_begin")
        if state.is_evaluation_due or (self.args.eval_on_start and state.step == 0):
            self._evaluate_again(state)
        self._hear_signals()
        self._call("on_step_begin")

    def record(self, state: TrainState, groups: Sequence[Group], report: StepReport) -> None:
        """End of a step: write its records, update the display, call the callbacks, then evaluate and save when due."""
        self.poll_saving()
        report = self.monitor.with_update(report)
        epoch_before = math.floor((state.step - 1) / self.steps_per_epoch + 1e-9)
        self.latest = state
        self.num_steps += 1
        self.trainer_state.global_step = state.step
        self.trainer_state.epoch = state.step / self.steps_per_epoch
        self._count(state)
        self.window = merge_metrics([self.window, report.metrics])
        self.window_seconds.append(report.seconds.get("step", 0.0))
        loss = report["loss"]
        self.total_loss += loss if math.isfinite(loss) else 0.0
        self.recorder.step(report, plain(report.metrics) | {"epoch": self.trainer_state.epoch}, groups)
        self.display.update(report, self.trainer_state.max_steps)
        self._act_on(self.monitor.look(report), state)
        self._call("on_step_end")
        self._follow(state, groups)
        is_last = state.step >= self.trainer_state.max_steps or self.control.should_training_stop
        if is_last or self.trainer_state.epoch >= epoch_before + 1 - 1e-9:
            self._call("on_epoch_end")  # of the last epoch too if training ends in the middle of it, as in transformers
            self._follow(state, groups)
            if not is_last:
                self._call("on_epoch_begin")
        self._hear_signals()
        if not self.should_stop:
            self._call("on_step_begin")

    def end(self, state: TrainState) -> dict[str, float]:
        """End of training: a checkpoint if the run was interrupted, and `on_train_end`. Returns the run's summary."""
        try:
            return self._end(state)
        except BaseException as error:
            self.fail(error)
            raise

    def _end(self, state: TrainState) -> dict[str, float]:
        self._hear_signals()
        if self.is_stop_requested and state.step > self.last_saved and self.args.save_strategy != "no":
            self._save(replace(state, is_evaluation_due=self.latest.is_evaluation_due))
        self.finish_saving()
        seconds = time.perf_counter() - self.started
        summary = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(self.num_steps * self.completions_per_step / seconds, 3),
            "train_steps_per_second": round(self.num_steps / seconds, 3),
            "total_flos": self.trainer_state.total_flos,
            "train_loss": self.total_loss / max(state.step, 1),
        }
        left = self._window(state)  # metrics not logged yet, if a run is shorter than `logging_steps`
        summary |= {name: value for name, value in left.items() if value is not None}
        self._announce(summary)
        self.finish_uploads()
        self._call("on_train_end")
        self.recorder.close("stopped" if self.is_stop_requested else "finished")
        self.display.close()
        return summary

    def save_after_error(self) -> None:
        """Save a checkpoint of the last complete step after an error, unless its state is not finite."""
        try:
            self.save(self.latest)
        except SpoiledError as spoiled:
            logger.error("%s", spoiled)

    def fail(self, error: BaseException) -> None:
        """End the run after an error: finish pending writes, and record the error in `run.json`."""
        if isinstance(error, RewardError):
            self.recorder.reward_failed(self.latest.step, error)
        try:
            self.finish_saving()
            self.finish_uploads()
        finally:
            self.recorder.close("failed")

    @property
    def completions_per_step(self) -> int:
        args = self.args
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def state_dict(self) -> dict[str, Any]:
        """Metrics collected for the next log entry."""
        window = {"window": dict(self.window), "seconds": list(self.window_seconds), "total_loss": self.total_loss}
        return {**window, "monitor": self.monitor.state_dict(), "evaluations": self.recorder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window, self.window_seconds = dict(state["window"]), list(state["seconds"])
        self.total_loss = state["total_loss"]
        if "monitor" in state:
            self.monitor.load_state_dict(state["monitor"])
        if "evaluations" in state:
            self.recorder.load_state_dict(state["evaluations"])

    def log(self, logs: Mapping[str, float]) -> None:
        """Add an entry to `log_history` and pass it to the trackers."""
        entry = {sys.intern(str(name)): value for name, value in logs.items()}  # one text of a name for all entries
        if self.trainer_state.epoch is not None:
            entry["epoch"] = round(self.trainer_state.epoch, 6)
        self.trainer_state.log_history.append({**entry, "step": self.trainer_state.global_step})
        self.control = self.handler.on_log(self.args, self.trainer_state, self.control, entry)

    def _count(self, state: TrainState) -> None:
        self.trainer_state.num_input_tokens_seen = state.num_tokens
        self.trainer_state.total_flos = self.flos_per_token * state.num_tokens

    def _hear_signals(self) -> None:
        self.is_stop_requested = self.agree(self.stop.requested or self.must_stop)

    def _act_on(self, alerts: Sequence[Alert], state: TrainState) -> None:
        """Run the configured actions of these alerts, after agreement between processes, whose timings differ."""
        by_action = {self.monitor.action_for(alert): alert for alert in alerts}
        reasons = {action: f"{alert.rule} at step {state.step}: {alert.said}." for action, alert in by_action.items()}
        has_roll_backs = state.roll_backs < self.args.roll_backs_limit
        if "roll_back" in reasons and has_roll_backs:
            self.ask_roll_back(reasons["roll_back"])
        ends = reasons.get("stop") or (reasons.get("roll_back") if not has_roll_backs else None)
        if ends is not None:
            self.must_stop = True
            self.recorder.event(state.step, Event(kind="stopped_by_alert", said=f"The run ends here: {ends}"))
        if self.monitor.lowers_learning_rate and self.agree("lower_learning_rate" in reasons):
            factor = self.args.roll_back_learning_rate
            self.lower_learning_rate(factor)
            why = reasons.get("lower_learning_rate", "another process asked for it.")
            event = Event(kind="learning_rate_lowered", said=f"The learning rate is multiplied by {factor:g}: {why}")
            self.recorder.event(state.step, event)

    # -- requests of the callbacks ----------------------------------------------------------------------------------

    def _follow(self, state: TrainState, groups: Sequence[Group]) -> None:
        if self.control.should_log and self.window_seconds:
            self._announce(self._window(state))
            self.show_completions(state.step, groups)
        saves_first = self.control.should_save and self.control.should_evaluate
        if saves_first:  # an evaluation may take longer than many steps, whose work a kill must not cost
            self._write(replace(state, is_evaluation_due=True))
        is_best = self.control.should_evaluate and self._evaluate(state)
        saves_best = self.args.save_strategy == "best" and is_best
        if saves_first:
            self.poll_saving()
            self._call("on_save")
        elif self.control.should_save or saves_best:
            self._save(state)
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        if self.control.should_epoch_stop and not self.is_epoch_stop_named:
            self.is_epoch_stop_named = True
            logger.warning(
                "A callback set control.should_epoch_stop, which has no effect: one order of prompts runs through all "
                "epochs. Set control.should_training_stop to end the training."
            )

    def _announce(self, logs: dict[str, Any]) -> None:
        (self.announce or self.log)(logs)

    def _window(self, state: TrainState) -> dict[str, Any]:
        """Metrics of the steps since the last log, None if undefined in all of them, and reset them; empty without such a step."""
        if not self.window_seconds:
            return {}
        logs: dict[str, Any] = {**dict.fromkeys(sorted(self.window)), **plain(self.window)}
        logs["num_tokens"] = float(state.num_tokens)
        logs["step_time"] = sum(self.window_seconds) / max(len(self.window_seconds), 1)
        count = max(len(self.window_seconds), 1)
        for name in LOSSES:
            if logs.get(name) is not None:  # a mean over the steps of the window
                logs[name] = logs[name] / count
        self.window, self.window_seconds = {}, []
        return logs

    def _evaluate_again(self, state: TrainState) -> None:
        """Evaluation before the first step of a run or a resume, in place of any of this step on record."""
        self.recorder.drop_evaluations(state.step)
        is_best = self._evaluate(state)
        if is_best and self.args.save_strategy == "best":  # the untrained model may turn out to be the best
            self._save(state)

    def _evaluate(self, state: TrainState) -> bool:
        """Evaluate now. Returns True if the result is the best so far, False also after a stop, which leaves the evaluation due."""
        self.latest = replace(state, is_evaluation_due=True)
        try:
            metrics = self.evaluate()
        except StopNow:
            sentence = "The evaluation was left, because a stop was asked for; a resume begins with it."
            logger.warning("step %d: %s", state.step, sentence)
            self.recorder.event(state.step, Event(kind="evaluation_left", said=sentence))
            return False
        self.latest = replace(state, is_evaluation_due=False)
        self.display.show(evaluation_line(self.trainer_state.global_step, metrics))
        self.monitor.watch.evaluated(metrics)
        self._call("on_evaluate", metrics=metrics)
        return self._is_best(metrics)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        name = self.args.metric_for_best_model
        if name is None:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            names = ", ".join(sorted(metrics))
            raise ConfigError(f"metric_for_best_model={name!r} is not among the evaluation's metrics: {names}.")
        value, best = metrics[name], self.trainer_state.best_metric
        sign = 1.0 if self.args.greater_is_better else -1.0
        if best is not None and sign * value <= sign * best:
            return False
        self.trainer_state.best_metric = value
        self.trainer_state.best_global_step = self.trainer_state.global_step
        return True

    def _save(self, state: TrainState) -> None:
        self._write(state)
        self._call("on_save")

    def _write(self, state: TrainState) -> None:
        self.save(state)
        self.last_saved = state.step

    def _call(self, event: str, **kwargs: Any) -> None:
        method, before = getattr(self.handler, event), dict(vars(self.args))
        self.control = method(self.args, self.trainer_state, self.control, **kwargs)
        late = {name for name, value in vars(self.args).items() if value is not before.get(name)} - self.late_options
        if event in ("on_train_begin", "on_step_begin", "on_step_end") and not self.should_stop:
            self.check_weights()
        if late:
            self.late_options |= late
            logger.warning(
                "a callback changed %s in the middle of the run, which acts in part or not at all: options are read where a run "
                "begins. Set them before train().", ", ".join(sorted(late)),
            )  # fmt: skip


def plain(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics as floats, sorted by name; undefined ones (NaN counts of nothing) are left out."""
    values = {name: float(metric.value) for name, metric in sorted(metrics.items())}
    keep_nan = {"loss", "grad_norm"}
    return {name: value for name, value in values.items() if name in keep_nan or not math.isnan(value)}
