"""Parts that presets share: a composition from its parts, and a bare KL coefficient read as the preset means it."""

from dataclasses import replace
from typing import Any

from covey.algorithms.algorithm import Algorithm
from covey.algorithms.importance import Correction
from covey.algorithms.kl import KL, k1
from covey.types import Advantage, Aggregate, Objective, ReferenceRule, Weight

KLOption = KL | float | None
DEFAULT_CORRECTION = Correction()
"""Sequences whose ratio of learner to sampler is above 3 are left out, others weighed by it: TRL 1.16's default."""


def made(
    name: str,
    advantage: Advantage,
    objective: Objective,
    aggregate: Aggregate,
    kl: KLOption,
    reference: ReferenceRule,
    correction: Weight | None,
) -> Algorithm:
    """An algorithm of these parts; `kl` may be a number, `correction` None."""
    weights = () if correction is None else (correction,)
    return Algorithm(
        name=name,
        advantage=advantage,
        objective=objective,
        aggregate=aggregate,
        kl=kl,  # type: ignore[arg-type]  # a number becomes a KL
        reference=reference,
        weights=weights,
    )


def in_reward(kl: KLOption) -> KLOption:
    """A bare coefficient is that of k1 in the reward."""
    if kl is None or isinstance(kl, KL):
        return kl
    return KL(k1, float(kl), where="reward") if kl else None


def level_of(kl: KLOption) -> Any:
    """Give an unbiased KL the sequence's ratio where the objective is sequence-level, as TRL."""
    return replace(kl, level="sequence") if isinstance(kl, KL) and kl.unbiased else kl
