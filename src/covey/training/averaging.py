"""Averaged weights of a run (`ema_decay`, `soup_steps`): used for evaluation, saved, and final at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.merging import WeightAverage
from covey.runs import checkpoint
from covey.training.parts import Parts

logger = logging.getLogger(__name__)


def average_of(args: Any, model: Any) -> WeightAverage | None:
    """Weight average of `ema_decay` or `soup_steps`; None without these options."""
    if args.ema_decay is None and args.soup_steps is None:
        return None
    return WeightAverage(model, decay=args.ema_decay, every=args.soup_steps)


@contextmanager
def averaged(parts: Parts, step: int) -> Iterator[None]:
    """Context in which model and sampler have the averaged weights, if there are any."""
    if parts.average is None or parts.average.is_empty:
        yield
        return
    with parts.average.in_place():
        parts.sampler.load(parts.learner.policy.model, version=step)
        yield
    parts.sampler.load(parts.learner.policy.model, version=step)


def restore_average(parts: Parts, saved: Mapping[str, Any]) -> None:
    """Restore the average of a checkpoint; a checkpoint without one starts it from its weights."""
    if parts.average is None:
        return
    if saved:
        parts.average.load_state_dict(saved)
        return
    logger.warning("The checkpoint holds no averaged weights; the average begins with the weights that it holds.")
    parts.average.restart()


def end_with_average(parts: Parts, args: Any, state: Any, *, is_whole: bool) -> None:
    """Load the averaged weights at the end of a run (of the best evaluation with `load_best_model_at_end`), unless it was stopped."""
    if parts.average is None or not is_whole:
        return
    best = parts.world.broadcast(state.best_model_checkpoint)
    if args.load_best_model_at_end and best is not None:
        parts.average.load_state_dict(checkpoint.load_state(Path(best))["average"])
    parts.average.put()
    parts.sampler.load(parts.learner.policy.model, version=state.global_step)
