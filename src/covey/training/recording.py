"""Records of a run on disk: metrics and rollouts of a step, contents of a checkpoint, and restoring it."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch

from covey.adapters import has_adapter
from covey.errors import CheckpointError, ConfigError, RewardError, SpoiledError, first_line
from covey.files.bounded import MOST_DEPTH, json_depth
from covey.learner.optimizer import follow_options, schedule_of
from covey.learner.shard_optimizer import load_saved_state, saved_state
from covey.learner.soundness import saved_weights, weight_fault
from covey.models import quiet_bars
from covey.process import rng
from covey.process.lean import ExportableState, TrainerState
from covey.process.memory import is_out_of_memory
from covey.process.shard_files import put_back
from covey.process.sharding import are_on_host, are_split, load_whole_state, shard_like, whole_state
from covey.process.world import World
from covey.rollout import NativeSampler
from covey.runs import RunFolder, checkpoint, evaluations, rollouts
from covey.runs.provenance import weight_facts
from covey.runs.resuming import decisive, expect_same_decisive, expect_same_model
from covey.runs.weights import names_to_write
from covey.training.evaluator import Forgetting, best_checkpoint, restore_average
from covey.training.parts import Parts
from covey.training.session import Session
from covey.training.state import TrainState
from covey.types import Event, Group, StepReport

logger = logging.getLogger(__name__)


def write_model(folder: Path, model: Any, tokenizer: Any, weights: dict[str, Any] | None = None) -> None:
    """Write model (or adapter) and tokenizer in transformers' format, readable by any tool.

    `weights` (None: the model's current ones): a copy of its `state_dict`. Raises SpoiledError, and writes nothing, if a
    weight is not finite.
    """
    if weights is None:
        expect_finite_end(model)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_bars():
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def weights_to_write(model: torch.nn.Module, world: World) -> dict[str, Any] | None:
    """Weights for `write_model`: full weights of a sharded model on the main process; else None, the model's own. Collective."""
    if not are_split(model):
        return None
    expect_finite_end(model, world)
    also = world.broadcast(names_to_write(model) if world.is_main else set())  # may ask the hub
    return whole_state(model, trained_only=has_adapter(model), also=also, keeps=world.is_main)


def checkpoint_tree(parts: Parts, state: TrainState) -> dict[str, Any]:
    """State of an exact resume, except the weights."""
    learner = parts.learner
    return {
        "state": state.to_dict(),
        "decisive": decisive(parts.session.args.to_dict()),
        "model": weight_facts(learner.policy.model),
        "optimizer": saved_state(learner.optimizer),
        "scheduler": learner.scheduler.state_dict(),
        "options": {"groups": learner.options, "factors": schedule_of(learner.scheduler)},
        "scaler": {} if learner.scaler is None else learner.scaler.state_dict(),
        "reference": learner.reference.state_dict(),
        "teacher": {} if learner.teacher is None else learner.teacher.state_dict(),
        "critic": dict(learner.critic.state_dict()),
        "memory": [sizes for part in parts.world.gather([_learned_sizes(parts)]) for sizes in part],
        "average": {} if parts.average is None else parts.average.state_dict(),
        "ladder": learner.guard.state_dict(),
        "prompts": parts.prompts.state_dict(),
        "scorer": parts.scorer.state_dict(),
        "window": parts.session.state_dict(),
        "in_flight": parts.supply.state_dict(),
        "rng": [snapshot for part in parts.world.gather([rng.snapshot()]) for snapshot in part],
    }


def restore_tree(parts: Parts, folder: Path) -> TrainState:
    """Restore the state of `checkpoint_tree` and the weights. Returns the state to continue from."""
    with as_checkpoint_errors(folder):
        return _restored(parts, folder)


@contextmanager
def as_checkpoint_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the content of a checkpoint, whose files are intact, into a CheckpointError."""
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{folder} does not fit this run ({first_line(error)}); it was changed, or is of another model. Resume from another "
            "checkpoint."
        ) from error


def _restored(parts: Parts, folder: Path) -> TrainState:
    model = parts.learner.policy.model
    tree = put_back(
        checkpoint.load_state(folder), folder, parts.world, is_split=are_split(model), on_host=are_on_host(model)
    )
    if not tree:
        raise CheckpointError(
            f"{folder} was saved with save_only_model, so it holds no state to resume from; give it as the model instead."
        )
    expect_same_decisive(folder, tree.get("decisive", {}), parts.session.args.to_dict())
    learner = parts.learner
    was, now = tree.get("model", {}), weight_facts(model)
    expect_same_model(folder, was, now)
    if was.get("dtype", now["dtype"]) != now["dtype"] and parts.world.is_main:
        logger.warning(
            "%s is of weights in %s and goes on in %s: numbers differ from here on.", folder, was["dtype"], now["dtype"]
        )
    load_weights(learner.policy.model, folder)
    load_saved_state(learner.optimizer, tree["optimizer"])
    _expect_shapes(learner.optimizer)
    learner.scheduler.load_state_dict(tree["scheduler"])
    if "options" in tree:
        follow_options(learner.optimizer, learner.scheduler, tree["options"], learner.options)
    if learner.scaler is not None and tree["scaler"]:  # empty of a run that was without float16
        learner.scaler.load_state_dict(tree["scaler"])
    learner.reference.load_state_dict(tree["reference"])
    if learner.teacher is not None:
        learner.teacher.load_state_dict(tree.get("teacher", {}))
    if tree["critic"]:
        current = learner.critic.state_dict()
        learner.critic.load_state_dict(
            {name: shard_like(value, current[name]) for name, value in tree["critic"].items()}
        )
    restore_average(parts, tree.get("average", {}))
    if "ladder" in tree:
        learner.guard.load_state_dict(tree["ladder"])
    parts.prompts.load_state_dict(tree["prompts"])
    parts.supply.load_state_dict(tree.get("in_flight"))
    parts.scorer.load_state_dict(tree["scorer"])
    parts.session.load_state_dict(tree["window"])
    rng.restore(_mine(parts, tree["rng"]))
    if len(tree["rng"]) != parts.world.size and parts.world.is_main:
        logger.warning(
            "%s was saved by %d process(es) and goes on with %d: the same prompts, draws and gradients up to rounding, "
            "but not bit-exact.",
            folder,
            len(tree["rng"]),
            parts.world.size,
        )
    if "memory" in tree:
        _restore_sizes(parts, _mine(parts, tree["memory"]))
    names = {item.name for item in fields(TrainState)}
    return TrainState(**{name: value for name, value in tree["state"].items() if name in names})


def _mine(parts: Parts, saved: Sequence[Any]) -> Any:
    """This process's entry; the last entry if there are more processes now."""
    return saved[min(parts.world.rank, len(saved) - 1)]


def _learned_sizes(parts: Parts) -> dict[str, Any]:
    """Batch sizes found to fit in this process's memory."""
    sampler = parts.sampler.state_dict() if isinstance(parts.sampler, NativeSampler) else {}
    return {"learner": parts.learner.micro_batcher.limits.state_dict(), "sampler": sampler}


def _restore_sizes(parts: Parts, saved: Mapping[str, Any]) -> None:
    parts.learner.micro_batcher.limits.load_state_dict(saved["learner"])
    if saved["sampler"] and isinstance(parts.sampler, NativeSampler):
        parts.sampler.load_state_dict(saved["sampler"])


def load_weights(model: Any, folder: Path) -> None:
    """Load the weights of a checkpoint into a model in place. Raises CheckpointError for missing, foreign or non-finite ones."""
    if has_adapter(model):
        from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

        name = model.active_adapter
        place = folder if name == "default" else folder / name  # as PEFT writes it
        current = get_peft_model_state_dict(model, adapter_name=name)
        weights = load_peft_weights(str(place), device="cpu")
        _expect_weights(weights, current, folder)
        if are_split(model):
            load_whole_state(current, weights)
            return
        set_peft_model_state_dict(model, weights, adapter_name=name)
        return
    dtypes = {value.dtype for value in model.state_dict().values() if value.is_floating_point()}
    with quiet_bars():  # in the type that holds all of the model's exactly, as of float32 norms in a bfloat16 model
        widest = functools.reduce(torch.promote_types, dtypes, model.dtype)
        saved, about = type(model).from_pretrained(folder, dtype=widest, output_loading_info=True)
    current, weights = model.state_dict(), saved.state_dict()
    _expect_weights({k: v for k, v in weights.items() if k not in about["missing_keys"]}, current, folder)
    if are_split(model):
        load_whole_state(current, weights)
        return
    model.load_state_dict(weights)


def _expect_weights(weights: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError unless every weight of the model is there, in its shape and finite."""
    if missing := sorted(set(current) - set(weights)):
        raise CheckpointError(f"{folder} has no weights for {missing[0]}; it was changed, or is of another model.")
    for name, value in weights.items():
        if name in current and value.shape != current[name].shape:
            shapes = f"{tuple(value.shape)} instead of {tuple(current[name].shape)}"
            raise CheckpointError(f"{folder}: {name} has the shape {shapes}; it was changed, or is of another model.")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{folder}: {name} is not finite; resume from another checkpoint.")


def _expect_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a moment of another shape than its parameter, which the next step would meet."""
    for parameter, state in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            moment = state.get(name)
            if isinstance(moment, torch.Tensor) and moment.shape != parameter.shape:
                raise ValueError(
                    f"{name} of the optimizer has the shape {tuple(moment.shape)}, not {tuple(parameter.shape)}"
                )


def load_best(model: torch.nn.Module, args: Any, state: TrainerState, world: World) -> Path | None:
    """With `load_best_model_at_end`, load the weights of the best evaluation's checkpoint, and return it. Every process must call it.

    Raises SpoiledError if the final weights are not finite.
    """
    best = _load_best(model, state, world) if args.load_best_model_at_end else None
    expect_finite_end(model, world)
    return best


def _load_best(model: torch.nn.Module, state: TrainerState, world: World) -> Path | None:
    best = best_checkpoint(state, world)
    if best is not None:
        load_weights(model, best)
    at = state.best_global_step
    if world.is_main and at is not None and (best is None or best.name != f"checkpoint-{at}"):
        ends = "its last weights" if best is None else f"those of {best.name}"
        logger.warning(
            "The best evaluation was at step %s, where no checkpoint was saved; the run ends with %s. "
            "save_strategy='best' saves one at every best evaluation.",
            at,
            ends,
        )
    return best


def expect_finite_end(model: torch.nn.Module, world: World | None = None) -> None:
    """Raise SpoiledError unless the weights to be saved are finite; with `world`, on every process together."""
    fault = weight_fault(saved_weights(model))
    if fault is not None or (world is not None and world.any(fault is not None)):
        raise SpoiledError(
            f"The model cannot be kept as it is: {fault or 'another process holds a weight that is not finite'}; look for a callback or hook that writes to it, and take the newest "
            "checkpoint of the run instead."
        )


def callback_states(handler: Any) -> dict[str, Any]:
    """State of the callbacks that can be saved, by class name (such as the counter of early stopping); a list for several of a class."""
    states: dict[str, list[Any]] = {}
    for callback in handler.callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: several if len(several) > 1 else several[0] for name, several in states.items()}


def restore_callbacks(handler: Any, states: Mapping[str, Any]) -> None:
    """Restore the saved state of callbacks, those of one class in their order; their options stay as given now."""
    left = {name: list(saved) if isinstance(saved, list) else [saved] for name, saved in states.items()}
    for callback in handler.callbacks:
        several = left.get(type(callback).__name__) if isinstance(callback, ExportableState) else None
        saved = several.pop(0) if several else None
        if isinstance(saved, Mapping):
            for name, value in saved.get("attributes", {}).items():
                setattr(callback, name, value)


def restore_history(session: Session, folder: Path) -> None:
    """Restore transformers' trainer state and the callbacks from a checkpoint."""
    path = folder / "trainer_state.json"
    if path.is_file() and json_depth(path.read_bytes()) > MOST_DEPTH:
        raise CheckpointError(f"{path} is nested more than {MOST_DEPTH} deep, so Covey did not write it.")
    with as_checkpoint_errors(folder):
        saved = TrainerState.load_from_json(str(path))
        for name in ("epoch", "log_history", "best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(session.trainer_state, name, getattr(saved, name))
        best = Path(saved.best_model_checkpoint or "")
        sibling = folder.parent / best.name  # where it is after the run was moved or copied, relative paths included
        if best.name and sibling.is_dir() and not (best.is_dir() and best.samefile(sibling)):
            session.trainer_state.best_model_checkpoint = str(sibling)
        restore_callbacks(session.handler, saved.stateful_callbacks)


class Recording:
    """Writer of a run's records. On processes other than the main one `folder` is None and nothing is written."""

    def __init__(
        self,
        folder: RunFolder | None,
        reward_names: Sequence[str],
        rollout_steps: int,
        rollout_limit: int | None = None,
        with_previews: bool = True,
    ) -> None:
        self.folder, self.reward_names = folder, list(reward_names)
        self.rollout_steps, self.rollout_limit, self.with_previews = rollout_steps, rollout_limit, with_previews
        self.forgetting = Forgetting()

    def state_dict(self) -> dict[str, Any]:
        """The evaluations that later ones are compared with."""
        return self.forgetting.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forgetting.load_state_dict(state)

    def step(self, report: StepReport, logs: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Write a step's metrics, events and, every `rollout_log_steps`, its rollouts."""
        if self.folder is None:
            return
        self.folder.append_metrics(report.step, logs, report.seconds)
        self.folder.append_events(report.step, report.events)
        if rollouts.is_due(report.step, self.rollout_steps):
            self.folder.write_rollouts(
                report.step,
                groups,
                self.reward_names,
                limit=self.rollout_limit,
                with_previews=self.with_previews,
                per_token=report.tokens,
            )

    def evaluation(
        self,
        step: int,
        name: str,
        weights: Sequence[float],
        evaluate: Callable[[Callable[[Sequence[Group]], None]], dict[str, float]],
    ) -> dict[str, float]:
        """Metrics of `evaluate(keep)`, which are written with all groups passed to `keep`."""
        rows: list[dict[str, Any]] = []
        metrics = evaluate(lambda groups: rows.extend(evaluations.rows_of(groups, self.reward_names, weights)))
        before = self.forgetting.best.get(name, {}).keys()
        metrics = {**metrics, **self.forgetting(name, rows)}
        if self.folder is not None:
            if before and before != self.forgetting.best[name].keys():
                logger.warning(
                    "step %d: the questions of %s are not those of its earlier evaluations, so forgetting starts anew, and a best "
                    "evaluation so far was one of other questions.",
                    step,
                    name,
                )
            self.folder.write_evaluation(step, name, metrics, rows)
        return metrics

    def bad_step(self, step: int, groups: Sequence[Group], report: StepReport) -> None:
        """Save the batch of a skipped update, to be read by `covey.training.recovery.bad_batch`."""
        if self.folder is not None:
            metrics = {name: metric.value for name, metric in report.metrics.items()}
            sentences = [event.said for event in report.events]
            self.folder.write_bad_step(
                step, {"groups": list(groups), "step": step, "said": sentences, "metrics": metrics}
            )

    def rewind(self, step: int, event: Event) -> None:
        """Roll the records back to `step`: later metrics, rollouts and checkpoints are moved away; events stay, `event` is added."""
        if self.folder is not None:
            self.folder.rewind(step, keep_events=True)
            self.folder.append_events(step, [event])

    def drop_evaluations(self, step: int) -> None:
        """Remove the evaluations of `step` and later from the records, before they are made again."""
        if self.folder is not None:
            self.folder.drop_evaluations(step)

    def reward_failed(self, step: int, error: RewardError) -> None:
        """Save the events of a reward error that ends the run, and name their file in the error."""
        if self.folder is not None and error.events:
            self.folder.append_events(step, error.events)
            error.args = (f"{error} The tracebacks are in {self.folder.path / 'events.jsonl'}.",)

    def event(self, step: int, event: Event) -> None:
        """Write an event outside of a step."""
        if self.folder is not None:
            self.folder.append_events(step, [event])

    def close(self, outcome: Literal["finished", "stopped", "failed"]) -> None:
        if self.folder is not None:
            self.folder.close(outcome)
