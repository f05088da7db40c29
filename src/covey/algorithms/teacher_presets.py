"""Presets that learn from a teacher by token, by default the policy itself with the group's best completion in its prompt.

Each takes the options of `TeacherRole` besides its own: `alg.rlsd(feedback="solution")`, `alg.mopd(teacher="big-model")`.
"""

from typing import Any

from covey.algorithms.advantages import GroupNormalized
from covey.algorithms.aggregation import SequenceMean, token_mean
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.control import Controller, WarmUp
from covey.algorithms.distillation import Distill, Divergence, zero
from covey.algorithms.importance import Correction
from covey.algorithms.making import DEFAULT_CORRECTION, Common, KLOption, made
from covey.algorithms.objectives import Clipped, policy_gradient
from covey.algorithms.surrogates import CISPO
from covey.algorithms.teacher_signals import (
    GatedDistill,
    PositionWeighted,
    Reshaped,
    TeacherAdvantage,
    TeacherReweighted,
)
from covey.algorithms.teachers import POLICY, TeacherRole, is_policy
from covey.errors import ConfigError
from covey.types import Objective, Weight


def rlsd(
    *,
    strength: float | Controller = 0.5,
    clip: float = 0.2,
    negative_only: bool = False,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    low: float = 0.2,
    high: float | None = None,
    kl: KLOption = None,
    correction: Weight | None = DEFAULT_CORRECTION,
    **role: Any,
) -> Algorithm:
    """GRPO whose advantage an informed teacher shares out over the tokens, without ever turning its sign.

    "Self-Distilled RLVR", 2026, <https://arxiv.org/abs/2604.03128>. `strength` is ms-swift's `rlsd_lambda`, `clip` its
    `rlsd_reweight_clip_range`. `warmup_steps` and `decay_steps` are its `rlsd_lambda_warmup_steps` and `rlsd_lambda_decay_steps`.
    """
    if warmup_steps or decay_steps:
        if isinstance(strength, Controller):
            raise ConfigError("rlsd's strength changes by itself already; leave warmup_steps and decay_steps out.")
        strength = WarmUp(strength, warmup_steps, decay_steps)
    objective = Reshaped(TeacherReweighted(strength, clip, negative_only), Clipped(low, high))
    return _with_teacher(
        made("rlsd", GroupNormalized(), objective, SequenceMean(), Common(kl=kl, correction=correction)), role
    )


def sdar(
    *,
    weight: float = 0.1,
    beta: float = 5.0,
    low: float = 0.2,
    high: float | None = None,
    kl: KLOption = None,
    correction: Weight | None = DEFAULT_CORRECTION,
    **role: Any,
) -> Algorithm:
    """GRPO plus a term that draws the policy up at tokens an informed teacher likes better, gated by how much.

    "Self-Distilled Agentic Reinforcement Learning", 2026, <https://arxiv.org/abs/2605.15155>. `weight` is ms-swift's
    `sdar_loss_coef`, `beta` its `sdar_gate_beta`.
    """
    algorithm = made(
        "sdar", GroupNormalized(), Clipped(low, high), SequenceMean(), Common(kl=kl, correction=correction)
    )
    return _with_teacher(algorithm.replace(regularizers=(GatedDistill(weight, beta),)), role)


def iw_opd(*, gamma: float = 0.5, correction: Weight | None = DEFAULT_CORRECTION, **role: Any) -> Algorithm:
    """On-policy distillation by the policy gradient of the teacher's log-ratio, early tokens of a completion weighing more.

    "IW-OPD", 2026, <https://arxiv.org/abs/2606.22600>, as TRL's `iw_opd` trainer. Rewards change nothing.
    """
    return _distilled("iw_opd", Reshaped(PositionWeighted(gamma), policy_gradient), correction, role)


def mopd(
    *, weight: float = 1.0, reward: float = 0.0, low: float | None = 0.5, high: float | None = 2.0, **role: Any
) -> Algorithm:
    """On-policy distillation from one or several teachers: `reward A + weight (log q - log p)` as each token's advantage.

    Xiao et al. 2026, "MiMo-V2-Flash", <https://arxiv.org/abs/2601.02780>, eq. 7 and 8; with `by="domain"` and a mapping each
    prompt has the teacher of its domain. Tokens whose ratio of learner to sampler is outside `low` to `high` are left out. The mean is
    over tokens, as NeMo-RL's; the paper's is over completions.
    """
    objective = Reshaped(TeacherAdvantage(weight, reward), policy_gradient)
    return _distilled("mopd", objective, Correction("token", "mask", high, low), role)


def sdpo(*, cap: float = 2.0, **role: Any) -> Algorithm:
    """Self-distillation alone: the policy with a success of its group in its prompt teaches the one without, by token.

    Huebotter et al. 2026, "Reinforcement Learning via Self-Distillation", <https://arxiv.org/abs/2601.20802>, with TRL's defaults:
    the reverse KL at the drawn token, the ratio capped at `cap`, and a teacher that is an exponential average. `threshold` is
    TRL's `success_reward_threshold`.
    """
    objective = Reshaped(TeacherAdvantage(against="current"), CISPO(cap))
    algorithm = made("sdpo", GroupNormalized(), objective, SequenceMean(), Common(correction=None))
    return _with_teacher(algorithm, {"feedback": "successful", **_following("ema", role)})


def opsd(*, divergence: Divergence = "jsd", beta: float = 0.5, top_k: int | None = None, **role: Any) -> Algorithm:
    """On-policy self-distillation alone: the policy of the start reads the solution and teaches, over the whole vocabulary.

    Zhao et al. 2026, "OPSD", <https://arxiv.org/abs/2601.18734>: the generalised Jensen-Shannon divergence.
    """
    return _by_distribution("opsd", divergence, beta, top_k, _following("base", role))


def sdft(
    *, divergence: Divergence = "reverse_kl", beta: float = 0.5, top_k: int | None = None, **role: Any
) -> Algorithm:
    """Self-distillation fine-tuning alone: an exponential average of the policy reads a demonstration and teaches.

    Shenfeld et al. 2026, "Self-Distillation Enables Continual Learning", <https://arxiv.org/abs/2601.19897>. `feedback` is the
    column of demonstrations.
    """
    return _by_distribution("sdft", divergence, beta, top_k, _following("ema", role))


def _with_teacher(algorithm: Algorithm, role: dict[str, Any]) -> Algorithm:
    return algorithm.replace(teacher=TeacherRole(**_informed(role)), name=algorithm.name.partition("+")[0])


def _following(kind: str, role: dict[str, Any]) -> dict[str, Any]:
    """The options of a role whose teacher follows the policy by `kind`; another model stays as it is."""
    return {"teacher_model_kind": kind, **role} if is_policy(role.get("teacher", POLICY)) else dict(role)


def _informed(role: dict[str, Any]) -> dict[str, Any]:
    """The options of a role; without a teacher it is the policy, and without feedback the group's best completion informs it."""
    return {"feedback": "best", **role} if is_policy(role.get("teacher", POLICY)) else dict(role)


def _distilled(name: str, objective: Objective, correction: Weight | None, role: dict[str, Any]) -> Algorithm:
    return _with_teacher(made(name, GroupNormalized(), objective, token_mean, Common(correction=correction)), role)


def _by_distribution(
    name: str, divergence: Divergence, beta: float, top_k: int | None, role: dict[str, Any]
) -> Algorithm:
    term = Distill(divergence=divergence, beta=beta, top_k=top_k, **_informed(role))
    algorithm = made(name, GroupNormalized(), zero, SequenceMean(), Common(correction=None))
    return algorithm.replace(regularizers=(term,), name=name)
