"""Parts that presets share: a composition from its parts, and a bare KL coefficient read as the preset means it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypedDict

from covey.algorithms.algorithm import Algorithm
from covey.algorithms.importance import Correction
from covey.algorithms.kl import KL, as_kl, k1
from covey.algorithms.reference import keep
from covey.types import Advantage, Aggregate, Objective, ReferenceRule, Weight

KLOption = KL | float | None
DEFAULT_CORRECTION = Correction()
"""Sequences whose ratio of learner to sampler is above 3 are left out, others weighed by it: TRL 1.16's default."""


class Common(TypedDict, total=False):
    """Options of every preset."""

    kl: KLOption
    """A coefficient for k3 in the loss (for k1 in the reward where the preset says so), a `KL`, or None."""
    reference: ReferenceRule
    """Rule by which the reference model follows the policy; by default it stays."""
    correction: Weight | None
    """Importance weight between sampler and learner; by default TRL's."""


def made(
    name: str,
    advantage: Advantage,
    objective: Objective,
    aggregate: Aggregate,
    common: Common,
    *,
    kl: KLOption = None,
    read: Callable[[KLOption], Any] = lambda kl: kl,
) -> Algorithm:
    """An algorithm of these parts. `kl` is the preset's default; `read` makes a KL of the option."""
    for unknown in common.keys() - Common.__annotations__.keys():
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}")
    correction = common.get("correction", DEFAULT_CORRECTION)
    return Algorithm(
        name=name,
        advantage=advantage,
        objective=objective,
        aggregate=aggregate,
        kl=read(common.get("kl", kl)),  # a number becomes a KL
        reference=common.get("reference", keep),
        weights=() if correction is None else (correction,),
    )


def in_reward(kl: KLOption) -> KLOption:
    """A bare coefficient is that of k1 in the reward."""
    if kl is None or isinstance(kl, KL):
        return kl
    plain = as_kl(kl)
    return plain and replace(plain, estimator=kl if callable(kl) else k1, where="reward")


def level_of(kl: KLOption) -> Any:
    """Give an unbiased KL the sequence's ratio where the objective is sequence-level, as TRL."""
    return replace(kl, level="sequence") if isinstance(kl, KL) and kl.unbiased else kl
