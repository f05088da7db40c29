"""Evaluation on held-out prompts: the rewards of training with a fixed seed, averaged weights, and what was forgotten."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from covey.algorithms import Algorithm
from covey.algorithms.greedy import with_greedy_rewards
from covey.data import PromptStream
from covey.errors import DataError
from covey.evaluation.intervals import paired_difference
from covey.learner import Learner
from covey.merging import WeightAverage
from covey.monitor.slices import Slices
from covey.process.shard_files import put_back
from covey.process.sharding import are_on_host, are_split
from covey.process.world import World
from covey.rewards import Scorer, reward_metrics
from covey.rollout import SamplingParams
from covey.rollout.sampler import DEFAULT_ROWS
from covey.runs import checkpoint, checksums, manifest
from covey.runs.evaluations import by_question
from covey.training.credit import completion_metrics, with_advantages
from covey.training.drawing import Draws
from covey.training.parts import Parts
from covey.training.state import LOSSES
from covey.types import Group, Mean, Metric, merge_metrics


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Samples `num_generations` completions for every prompt of a data set and scores them."""

    draws: Draws
    scorer: Scorer
    learner: Learner
    algorithm: Algorithm
    world: World
    sampling: SamplingParams
    num_generations: int
    batch_size: int
    """Completions that the learner evaluates at a time in this process; no result depends on it but the mean of the loss over batches."""
    seed: int
    slices: Slices = field(default_factory=lambda: Slices(()))
    """Metrics by the values of a column."""

    def __call__(
        self,
        prompts: PromptStream,
        count: int,
        controllers: Mapping[str, float],
        prefix: str,
        keep: Callable[[Sequence[Group]], None] = lambda groups: None,
        after_batch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Metrics of the first `count` rows by TRL's names, each with `prefix` (such as `eval`).

        The seed is fixed: two evaluations differ by the policy alone. Failed rewards are left out of the
        means, as in training; `<prefix>_loss` is the algorithm's loss on these completions. `keep` receives every scored
        group, in order; `after_batch` is called after each batch. Raises DataError where every prompt is too long.
        """
        started, num_prompts = time.perf_counter(), 0
        algorithm = self.algorithm.resolve(controllers)
        parts: list[dict[str, Metric]] = []
        per_turn = max(1, self.batch_size * self.world.size // self.num_generations)
        per_draw = per_turn * max(1, DEFAULT_ROWS * self.world.size // (per_turn * self.num_generations))
        for groups in self._drawn(prompts, count, per_draw, per_turn, algorithm.needs.greedy):
            keep(groups)
            num_prompts += len(groups)
            groups = self.learner.annotate(groups, algorithm)
            scaled = self.scorer.combiner(groups, learn=False)
            groups = with_advantages(groups, algorithm, self.scorer.weights, scaled)
            losses = _by_completion(self.learner.loss(groups, algorithm), sum(group.size for group in groups))
            scales = self.scorer.observe(groups)
            rewards = reward_metrics(groups, self.scorer.names, self.scorer.weights, scales)
            sliced = self.slices(groups, self.scorer.weights, scales)
            logged = self.world.merge(self.scorer.take_metrics())
            parts.append({**losses, **rewards, **logged, **completion_metrics(groups), **sliced})
            after_batch()
        self.learner.policy.release()  # callbacks and the user may use the model now
        if not num_prompts:
            raise DataError(
                f"Every prompt of {prefix}'s data set is too long for the model's context, so nothing can be evaluated."
            )
        return self._named(merge_metrics(parts), len(parts), num_prompts, time.perf_counter() - started, prefix)

    def _drawn(
        self, prompts: PromptStream, count: int, per_draw: int, per_turn: int, needs_greedy: bool
    ) -> Iterator[list[Group]]:
        """Scored groups of the first `count` rows, `per_turn` at a time; as many are drawn at once as the sampler decodes."""
        for start in range(0, count, per_draw):
            batch = prompts.take_rows(min(per_draw, count - start))
            if not batch:
                continue
            sampling = replace(self.sampling, seed=self.seed)
            groups = self.world.interleave(self.draws(batch, self.num_generations, sampling))
            if needs_greedy:
                groups = with_greedy_rewards(groups, self.draws.greedy(batch, sampling))
            for place in range(0, len(groups), per_turn):
                yield groups[place : place + per_turn]

    def _named(
        self, metrics: Mapping[str, Metric], turns: int, count: int, seconds: float, prefix: str
    ) -> dict[str, float]:
        named = {}
        for name, metric in sorted(metrics.items()):
            if not math.isnan(metric.value):
                named[f"{prefix}_{name}"] = float(metric.value)
        named[f"{prefix}_runtime"] = round(seconds, 4)
        named[f"{prefix}_samples_per_second"] = round(count * self.num_generations / seconds, 3)
        named[f"{prefix}_steps_per_second"] = round(turns / seconds, 3)
        return named


def _by_completion(metrics: Mapping[str, Metric], count: int) -> dict[str, Metric]:
    """The metrics of a batch, its losses as means over its completions, as transformers averages `eval_loss` over rows."""
    return {name: Mean(metric.value * count, count) if name in LOSSES else metric for name, metric in metrics.items()}


logger = logging.getLogger(__name__)


def average_of(args: Any, model: Any) -> WeightAverage | None:
    """Weight average of `ema_decay` or `soup_steps`; None without these options."""
    if args.ema_decay is None and args.soup_steps is None:
        return None
    return WeightAverage(model, decay=args.ema_decay, every=args.soup_steps)


@contextmanager
def averaged(parts: Parts, step: int) -> Iterator[None]:
    """Context in which the model and the sampler of evaluations have the averaged weights, if there are any."""
    if parts.average is None or parts.average.is_empty:
        yield
        return
    is_shared = parts.evaluation_sampler is None
    try:
        with parts.average.in_place():
            if is_shared:
                parts.sampler.load(parts.learner.policy.model, version=step)
            yield
    except BaseException:  # of several processes, others may wait in another collective
        is_shared = is_shared and parts.world.size == 1
        raise
    finally:  # a reward may have raised, and the caller may train on
        if is_shared:
            parts.sampler.load(parts.learner.policy.model, version=step)


def restore_average(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Restore the average of a checkpoint; a checkpoint without one starts it from its weights."""
    if parts.average is None:
        return
    is_same = bool(saved) and saved.get("is_soup") in (None, parts.average.every is not None)
    if is_same:
        parts.average.load_state_dict(saved)
        return
    fault = "averaged weights of the other kind (ema_decay, soup_steps)" if saved else "no averaged weights"
    logger.warning("The checkpoint holds %s; the average begins with the weights that it holds.", fault)
    parts.average.restart()


def end_with_average(parts: Parts, args: Any, state: Any, best: Path | None, *, is_whole: bool) -> None:
    """Load the averaged weights at the end of a run (those of `best`, the checkpoint that it ends with, if any), unless it was stopped.

    The sampler gets the weights with which the run ends, which are not those of its last step.
    """
    if parts.average is not None and is_whole:
        if best is not None:
            saved = checkpoint.load_state(best)["average"]
            model = parts.learner.policy.model
            options = {"is_split": are_split(model), "on_host": are_on_host(model)}
            parts.average.load_state_dict(put_back(saved, best, parts.world, **options))
        parts.average.put()
    elif not args.load_best_model_at_end:
        return
    parts.sampler.load(parts.learner.policy.model, version=state.global_step)


def best_checkpoint(state: Any, world: World) -> Path | None:
    """Checkpoint of the best evaluation that has one. Every process must call it.

    None without one, or, with a warning and from now on, where it is gone or no longer as it was written.
    """
    named = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint)
    if named is not None and world.is_main:
        place, moves = named.parent, set[Path]()
        while not (place / named.name).is_dir() and place not in moves:
            moves.add(place)  # the folder of each move names the one of the move before
            place = Path((manifest.read(place / manifest.NAME) or {}).get(manifest.MOVED_TO, place))
        if place not in moves:
            named = place / named.name
            state.best_model_checkpoint = str(named)
        faults = checksums.problems(named) if named.is_dir() else ["gone"]
        if faults:
            is_now = f"is damaged ({'; '.join(faults)})" if named.is_dir() else "is not there any more"
            logger.warning("%s, the checkpoint of the best evaluation, %s.", named, is_now)
            state.best_model_checkpoint = named = None
    return world.broadcast(named)  # only the main process knows the saved checkpoints


@dataclass
class Forgetting:
    """The best evaluation so far of each set. Part of checkpoints, so that a resumed run compares with the same one."""

    best: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean reward by question of the best evaluation, by the name of the set; NaN where nothing was scored."""
    looks: dict[str, int] = field(default_factory=dict)
    """Evaluations so far."""

    def __call__(self, name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics `<name>_forgetting` with `/low` and `/high` (95%) and `/p`; none for the first evaluation of these questions.

        `rows` as of `covey.runs.evaluations.rows_of`. The best of `k` earlier evaluations is high partly by chance, so the
        p-value is multiplied by `k` (Bonferroni). Above 0: mean reward that the policy had and lost.
        """
        now = by_question(rows)
        best = self.best.get(name, {})
        if not now or best.keys() != now.keys():
            self.best[name], self.looks[name] = now, 1
            return {}
        difference = paired_difference(list(now.values()), [best[question] for question in now])
        count = self.looks[name]
        self.looks[name] += 1
        if _mean(now) > _mean(best):
            self.best[name] = now
        prefix = f"{name}_forgetting"
        return {} if difference.count == 0 else {
            prefix: difference.value,
            f"{prefix}/low": difference.low,
            f"{prefix}/high": difference.high,
            f"{prefix}/p": min(1.0, difference.p_value * count),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"best": {name: dict(scores) for name, scores in self.best.items()}, "looks": dict(self.looks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = {name: dict(scores) for name, scores in state["best"].items()}
        self.looks = dict(state["looks"])


def _mean(scores: Mapping[str, float]) -> float:
    finite = [score for score in scores.values() if not math.isnan(score)]
    return sum(finite) / len(finite) if finite else -math.inf
