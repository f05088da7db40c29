"""Cases that verl ran, as calls of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from golden import Case, UnknownCaseError
from torch import Tensor
from trl_cases import gradient, values_of
from verl_advantages import Layout, advantage, scores_of

from covey import algorithms as alg
from covey.algorithms import aggregation
from covey.algorithms.composing import metrics_of
from covey.algorithms.importance import mismatch
from covey.algorithms.token_advantages import token_rewards
from covey.types import Aggregate, Max, Mean, Metric, Min, Objective, TokenBatch, Totals
from covey.types.metrics import EffectiveSize

LIMIT = 20.0
SEQUENCE_MEAN = alg.SequenceMean("nonempty", guard=1e-8)


# -- tokens and denominators ------------------------------------------------------------------------------------------


def tokens_of(case: Case, advantages: Tensor | None = None) -> TokenBatch:
    """The inputs as tokens. An advantage a row stands for `advantage x mask`, which is what verl passes."""
    mask = case.need("mask").bool()
    logp = case.tensor("logp")
    logp = (torch.zeros(mask.shape, dtype=torch.float64) if logp is None else logp).requires_grad_()
    old = case.tensor("old_logp")
    given = case.tensor("advantages") if advantages is None else advantages
    given = torch.zeros(mask.shape[0], dtype=torch.float64) if given is None else given
    if given.ndim == 1:
        given = given.unsqueeze(-1) * mask
    return TokenBatch(
        logp=logp,
        old_logp=logp.detach() if old is None else old,
        advantages=given,
        mask=mask,
        group=torch.zeros(mask.shape[0], dtype=torch.long),
        sampler_logp=case.tensor("sampler_logp"),
        ref_logp=case.tensor("ref_logp"),
    )


def aggregate_of(case: Case, mask: Tensor, mode: str | None = None) -> tuple[Aggregate, Totals, float]:
    """The aggregate of `loss_agg_mode`, its denominators, and what verl multiplies the share of a process by."""
    mode = case.option("loss_agg_mode", "token-mean") if mode is None else mode
    totals, times = Totals.of(mask, torch.zeros(len(mask)), mask.shape[1]), float(case.option("dp_size", 1))
    if (num_tokens := case.option("batch_num_tokens")) is not None:
        totals = replace(totals, tokens=int(num_tokens))
    if (num_rows := case.option("global_batch_size")) is not None:
        totals = replace(totals, nonempty_sequences=int(num_rows), sequences=int(num_rows))
    length = case.option("loss_scale_factor") or mask.shape[1]
    found: dict[str, tuple[Aggregate, float]] = {
        "token-mean": (alg.token_mean, times),
        "seq-mean-token-sum": (alg.SequenceSum("nonempty"), times),
        "seq-mean-token-mean": (SEQUENCE_MEAN, times),
        "seq-mean-token-sum-norm": (alg.Constant(length, per_sequence=False), 1.0),
        "rows": (alg.RowMean(), 1.0),
    }
    if mode not in found:
        raise UnknownCaseError(f"loss_agg_mode {mode!r} is not known")
    aggregate, factor = found[mode]
    return aggregate, totals, factor


# -- objectives -------------------------------------------------------------------------------------------------------


def low_high(case: Case, default: float = 0.2) -> tuple[float, float]:
    fallback = case.option("clip_ratio", default)
    return case.option("clip_ratio_low", fallback), case.option("clip_ratio_high", fallback)


def vanilla(case: Case) -> Objective:
    low, high = low_high(case)
    return alg.Clipped(low, high, dual=case.option("clip_ratio_c", 3.0), limit=LIMIT)


def gmpo_objective(case: Case) -> Objective:
    low, high = low_high(case)
    weights = case.tensor("rollout_is_weights")
    return alg.GMPO(low, high, correction=None if weights is None else constant(weights), guard=1e-8)


def cispo_objective(case: Case) -> Objective:
    low, high = low_high(case)
    return alg.CISPO(1 + high, 1 - low, limit=LIMIT)


def clip_cov_objective(case: Case) -> Objective:
    share, lower = case.option("clip_cov_ratio", 2e-4), case.option("clip_cov_lb", 1.0)
    return alg.ClipCov(*low_high(case), share, lower, case.option("clip_cov_ub", 5.0))


OBJECTIVES: dict[str, Callable[[Case], Objective]] = {
    "vanilla": vanilla,
    "gspo": lambda case: alg.GSPOToken(*low_high(case)),
    "sapo": lambda case: alg.SAPO(case.option("tau_pos", 1.0), case.option("tau_neg", 1.05), limit=LIMIT),
    "gpg": lambda case: alg.policy_gradient,
    "cispo": cispo_objective,
    "geo_mean": gmpo_objective,
    "clip_cov": clip_cov_objective,
    "kl_cov": lambda case: alg.KLCov(case.option("kl_cov_ratio", 2e-4), case.option("ppo_kl_coef", 1.0)),
    "reinforce": lambda case: alg.policy_gradient,
}
FIXED_MODE = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "rows"}
UNCLIPPED_KL = ("gspo", "clip_cov", "geo_mean", "reinforce", "kl_cov")
CLIPPED = {
    "cispo": "clip_ratio/bounded_mean",
    "geo_mean": "clip_ratio/positive_mean",
    "clip_cov": "clip_ratio/cov_mean",
}
CLIPPED_LOWER = {"vanilla": "clip_ratio/dual_mean", "geo_mean": "clip_ratio/negative_mean"}


def constant(weights: Tensor) -> Callable[[TokenBatch], Tensor]:
    return lambda tokens: weights


def policy_loss(case: Case) -> dict[str, Any]:
    kind = case.option("policy_loss")
    if kind == "bypass_mode":
        return bypass(case)
    if kind not in OBJECTIVES:
        raise UnknownCaseError(f"policy_loss {kind!r} is not known")
    weights = case.tensor("rollout_is_weights")
    factor = constant(weights) if weights is not None and kind != "geo_mean" else None
    return judged_loss(case, kind, tokens_of(case), OBJECTIVES[kind](case), factor)


def judged_loss(case: Case, kind: str, tokens: TokenBatch, objective: Objective, weight: Any = None) -> dict[str, Any]:
    """Loss, gradient and metrics of one objective, weighted where a weight is given."""
    given_mode = case.option("loss_agg_mode", "token-mean")
    aggregate, totals, times = aggregate_of(case, tokens.mask, FIXED_MODE.get(kind, given_mode))
    algorithm = alg.Algorithm(objective=objective, aggregate=aggregate, weights=() if weight is None else (weight,))
    algorithm = algorithm.prepare(tokens.detached(), totals)
    loss = times * algorithm.loss(tokens, totals)
    metrics = {**values_of(algorithm.metrics(tokens, totals)), **objective_metrics(kind, algorithm.objective, tokens)}
    return {"loss": loss, "grad_logp": gradient(loss, tokens.logp), "metrics": metrics}


def objective_metrics(kind: str, objective: Objective, tokens: TokenBatch) -> dict[str, float]:
    """The library's metrics by verl's names."""
    own = values_of(metrics_of(objective, tokens))
    estimator = alg.abs_kl if kind == "kl_cov" else alg.k1
    log_ratio = tokens.log_ratio if kind in UNCLIPPED_KL else tokens.log_ratio.clamp(-LIMIT, LIMIT)
    moved = estimator(torch.zeros_like(log_ratio), log_ratio.detach())
    return {
        "actor/pg_clipfrac": own.get(CLIPPED.get(kind, "clip_ratio/region_mean"), 0.0),
        "actor/pg_clipfrac_lower": own.get(CLIPPED_LOWER.get(kind, ""), 0.0),
        "actor/ppo_kl": Mean.of(moved, tokens.mask).value,
    }


def bypass(case: Case) -> dict[str, Any]:
    """The old policy is the sampler's; rejection shrinks the mask, then weights or the clip act."""
    tokens, inner = tokens_of(case), dict(case.option("rollout_correction") or {})
    kind = inner.pop("loss_type")
    tokens = replace(tokens, sampler_logp=tokens.old_logp)
    correction, rejections = sampler_parts(inner, against="current")
    keep = kept(tokens, rejections)
    weights = torch.ones_like(tokens.logp) if correction is None else correction(tokens).expand_as(tokens.mask)
    weights = (weights * tokens.mask).detach()
    tokens = replace(tokens, mask=keep)
    if kind == "reinforce":
        result = judged_loss(case, "reinforce", tokens, alg.policy_gradient, constant(weights))
    elif kind == "ppo_clip":
        result = judged_loss(case, "vanilla", tokens, vanilla(case))
    else:
        raise UnknownCaseError(f"loss_type {kind!r} of rollout_correction is not known")
    return {**result, "intermediate": {"modified_mask": keep, "rollout_is_weights": weights}}


# -- sampler against learner --------------------------------------------------------------------------------------------


def sampler_parts(options: dict[str, Any], against: Any = "old") -> tuple[alg.Correction | None, list[alg.Rejection]]:
    """The weight and the rejections that verl's options describe."""
    level, normalize = options.pop("rollout_is", None), bool(options.pop("rollout_is_batch_normalize", False))
    high = options.pop("rollout_is_threshold", 2.0)
    correction = None
    if level is not None:
        correction = alg.Correction(level, "truncate", high, normalize=normalize, limit=LIMIT, against=against)
    names, bounds = options.pop("rollout_rs", None), options.pop("rollout_rs_threshold", None)
    if options:
        raise UnknownCaseError(f"rollout correction options {sorted(options)} are not known")
    pairs = [] if not names else list(zip(str(names).split(","), str(bounds).split(","), strict=True))
    rejections = []
    for name, bound in pairs:
        low, _, up = bound.strip().rpartition("_")
        rejections.append(alg.Rejection(name.strip(), float(up), float(low) if low else None, against))  # type: ignore[arg-type]
    return correction, rejections


def kept(tokens: TokenBatch, rejections: list[alg.Rejection]) -> Tensor:
    keep = tokens.mask
    for rejection in rejections:
        keep = keep & rejection.keep(tokens)
    return keep


def rollout_correction(case: Case) -> dict[str, Any]:
    tokens = tokens_of(case)
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    correction, rejections = sampler_parts(case.options(names))
    metrics, result = values_of(mismatch_metrics(tokens)), {}
    if correction is not None:
        result["rollout_is_weights"] = correction(tokens).expand_as(tokens.mask) * tokens.mask
        metrics.update(weight_metrics(correction, tokens))
    keep = kept(tokens, rejections)
    lost = tokens.mask & ~keep
    metrics["rollout_rs_masked_fraction"] = Mean.of(lost, tokens.mask).value
    metrics["rollout_rs_seq_masked_fraction"] = Mean.of(lost.any(-1)).value
    return {**result, "modified_mask": keep, "metrics": metrics}


def mismatch_metrics(tokens: TokenBatch) -> dict[str, Metric]:
    """verl's measures of the library's `mismatch`, over tokens of the mask, or over all rows."""
    gap = mismatch(tokens)
    sampler = tokens.old_logp if tokens.sampler_logp is None else tokens.sampler_logp.nan_to_num(0.0)
    perplexity = lambda logp: (-tokens.per_sequence(logp)).exp().squeeze(-1)
    return {
        "kl": Mean.of(-gap, tokens.mask),
        "k3_kl": Mean.of(gap.exp() - 1 - gap, tokens.mask),
        "training_ppl": Mean.of(perplexity(tokens.old_logp)),
        "rollout_ppl": Mean.of(perplexity(sampler)),
        "chi2_token": Mean.of((2 * gap).clamp(max=LIMIT).exp() - 1, tokens.mask),
        "chi2_seq": Mean.of((2 * gap.sum(-1)).clamp(max=LIMIT).exp() - 1),
    }


def weight_metrics(correction: alg.Correction, tokens: TokenBatch) -> dict[str, float]:
    raw, high = correction.raw(tokens).expand_as(tokens.mask), correction.high or 1.0
    bounded = replace(correction, low=1.0 / high, normalize=False)(tokens)
    return {
        "rollout_is_mean": Mean.of(raw, tokens.mask).value,
        "rollout_is_max": Max(raw[tokens.mask].max().item()).value,
        "rollout_is_min": Min(raw[tokens.mask].min().item()).value,
        "rollout_is_eff_sample_size": EffectiveSize.of(bounded.expand_as(tokens.mask)[tokens.mask]).value,
        "rollout_is_batch_norm_factor": correction.step_mean(tokens) if correction.normalize else 1.0,
    }


def aggregation_case(case: Case) -> dict[str, Any]:
    values, mask = case.need("values").requires_grad_(), case.need("mask").bool()
    aggregate, totals, times = aggregate_of(case, mask)
    zeros = torch.zeros_like(values).detach()
    group = torch.zeros(len(mask), dtype=torch.long)
    tokens = TokenBatch(logp=zeros, old_logp=zeros, advantages=zeros, mask=mask, group=group)
    loss = times * aggregate(values, tokens, totals)
    return {"loss": loss, "grad_values": gradient(loss, values)}


# -- KL -----------------------------------------------------------------------------------------------------------------


def estimator_of(name: str) -> Any:
    """verl's k3 is the clipped one."""
    clipped = {"k3": "low_var_kl", "k3+": "low_var_kl+"}.get(name, name)
    if clipped not in alg.ESTIMATORS:
        raise UnknownCaseError(f"kl_penalty {name!r} is not known")
    return alg.ESTIMATORS[clipped]


def kl_estimator(case: Case) -> dict[str, Any]:
    tokens = tokens_of(case)
    kl = alg.KL(estimator_of(case.option("kl_penalty")), 1.0).measured(tokens)
    kl = aggregation.masked(kl, tokens)
    return {"kl": kl, "grad_logp": gradient(kl.sum(), tokens.logp)}


def kl_loss(case: Case) -> dict[str, Any]:
    tokens = tokens_of(case)
    aggregate, totals, times = aggregate_of(case, tokens.mask)
    kl = alg.KL(estimator_of(case.option("kl_penalty")), case.option("kl_loss_coef", 0.001))
    loss = times * alg.Algorithm(kl=kl, aggregate=aggregate).loss(tokens, totals)  # the advantages are zero
    return {"loss": loss, "grad_logp": gradient(loss, tokens.logp)}


def controller_of(case: Case) -> Callable[[float, float, float], float]:
    """(coefficient, kl, completions) -> the next coefficient."""
    kind = case.option("controller", "fixed")
    if kind == "fixed":
        case.option("target_kl"), case.option("horizon")  # a fixed coefficient ignores them, as in verl
        return lambda value, kl, count: value
    if kind == "adaptive":
        return alg.AdaptiveKL(case.option("target_kl"), horizon=case.option("horizon")).moved
    raise UnknownCaseError(f"controller {kind!r} is not known")


def kl_in_reward(case: Case) -> dict[str, Any]:
    scores, mask = case.need("token_level_scores"), case.need("mask").bool()
    old, ref, coefficient = case.need("old_logp"), case.need("ref_logp"), case.option("kl_coef")
    kl = alg.KL(estimator_of(case.option("kl_penalty")), coefficient, where="reward")
    layout = Layout(torch.arange(len(mask)))
    penalty = layout.fold(kl.penalty(old, ref))
    rewards = layout.unfold(token_rewards(scores_of(case, layout, scores, mask, kl=penalty)))
    group = torch.zeros(len(mask), dtype=torch.long)
    tokens = TokenBatch(logp=old, old_logp=old, advantages=torch.zeros_like(old), mask=mask, group=group, ref_logp=ref)
    current = alg.SequenceMean()(kl.measured(tokens), tokens, Totals.of(mask, group, mask.shape[1])).item()
    after = controller_of(case)(coefficient, current, len(mask))
    return {"token_level_rewards": rewards, "current_kl": current, "kl_coef_after": after}


def kl_controller(case: Case) -> dict[str, Any]:
    value, update, seen = case.option("kl_coef"), controller_of(case), []
    for kl, count in zip(case.need("current_kl"), case.need("n_steps"), strict=True):
        value = update(value, kl.item(), count.item())
        seen.append(value)
    return {"kl_coef_per_update": seen}


# -- critic -------------------------------------------------------------------------------------------------------------


def value_loss(case: Case, returns: Tensor | None = None) -> dict[str, Any]:
    mask, values = case.need("mask").bool(), case.need("vpreds").requires_grad_()
    aggregate, totals, times = aggregate_of(case, mask)
    zeros, group = torch.zeros_like(values).detach(), torch.zeros(len(mask), dtype=torch.long)
    tokens = TokenBatch(
        logp=zeros,
        old_logp=zeros,
        advantages=zeros,
        mask=mask,
        group=group,
        values=values,
        old_values=case.need("values"),
        returns=case.need("returns") if returns is None else returns,
    )
    critic = alg.Critic(alg.ClippedError(case.option("cliprange_value", 0.5)), aggregate=aggregate)
    loss = times * critic.loss(tokens, totals)
    clipped = values_of(metrics_of(critic.error, tokens))["value/clip_ratio"]
    return {"loss": loss, "grad_vpreds": gradient(loss, values), "metrics": {"vf_clipfrac": clipped}}


def ppo(case: Case) -> dict[str, Any]:
    """The clipped objective alone, or the whole chain where scores are given."""
    if "token_level_scores" not in case.inputs:
        return policy_loss(case)
    judged = kl_in_reward(case)
    mask, layout = case.need("mask").bool(), Layout(torch.arange(len(case.need("mask"))))
    scores = scores_of(case, layout, judged["token_level_rewards"], mask, values=layout.fold(case.need("values")))
    estimator = alg.GAE(case.option("gamma", 1.0), case.option("lam", 1.0))
    advantages, returns = (layout.unfold(x) for x in (estimator(scores), estimator.returns(scores)))
    policy = judged_loss(case, "vanilla", tokens_of(case, advantages), vanilla(case))
    value = value_loss(case, returns)
    return {
        **judged,
        "advantages": advantages,
        "returns": returns,
        "policy_loss": policy["loss"],
        "grad_logp": policy["grad_logp"],
        "value_loss": value["loss"],
        "grad_vpreds": value["grad_vpreds"],
        "metrics": {**policy["metrics"], **value["metrics"]},
    }


BY_NAME: dict[str, Callable[[Case], dict[str, Any]]] = {
    "ppo": ppo,
    "rollout_correction": rollout_correction,
    "aggregation": aggregation_case,
    "kl_loss": kl_loss,
    "kl_in_reward": kl_in_reward,
    "adaptive_kl": kl_controller,
    "fixed_kl": kl_controller,
    "value_loss": value_loss,
}


def adapter(case: Case) -> Callable[[Case], dict[str, Any]]:
    """By the case's kind; where that is the name of an algorithm, by what its options choose."""
    if case.algorithm in BY_NAME:
        return BY_NAME[case.algorithm]
    if "estimator" in case.config:
        return advantage
    if "policy_loss" in case.config:
        return policy_loss
    if "kl_penalty" in case.config and "kl" in case.expected:
        return kl_estimator
    raise UnknownCaseError(f"algorithm {case.algorithm!r} of verl is not known")
