"""Cases that TRL ran, as calls of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from golden import Case, UnknownCaseError
from torch import Tensor

from covey import algorithms as alg
from covey.algorithms.advantages import is_tied
from covey.algorithms.importance import Correction, OffPolicyMask
from covey.algorithms.reference import mixed
from covey.rewards import reward_metrics
from covey.types import Completion, Group, Mean, Prompt, Scores, StepReport, TokenBatch, Totals
from covey.types.metrics import Metric

OPTIONS = tuple(inspect.signature(alg.from_options).parameters)


def tokens_of(case: Case) -> TokenBatch:
    """The inputs as tokens; `logp`, `entropy` and `values` can take a gradient. TRL has one prompt in adjacent rows."""
    logp = case.need("logp").requires_grad_()
    old, entropy, advantages = case.tensor("old_logp"), case.tensor("entropy"), case.need("advantages")
    return TokenBatch(
        logp=logp,
        old_logp=logp.detach() if old is None else old,
        advantages=advantages if advantages.ndim == 2 else advantages.unsqueeze(-1),
        mask=case.need("mask").bool(),
        group=torch.zeros(logp.shape[0], dtype=torch.long),
        sampler_logp=case.tensor("sampler_logp"),
        ref_logp=case.tensor("ref_logp"),
        entropy=None if entropy is None else entropy.requires_grad_(),
    )


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    """d loss / d of; zeros where the loss does not depend on it."""
    if not loss.requires_grad:
        return torch.zeros_like(of)
    found = torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(of) if found is None else found


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def judge_loss(algorithm: alg.Algorithm, tokens: TokenBatch, max_length: int) -> dict[str, Any]:
    """Loss, gradients and metrics of one step held in one batch."""
    totals = Totals.of(tokens.mask, tokens.group, max_length)
    algorithm = algorithm.prepare(tokens.detached(), totals)
    loss = algorithm.loss(tokens, totals)
    result: dict[str, Any] = {"loss": loss, "grad_logp": gradient(loss, tokens.logp)}
    if tokens.entropy is not None:
        result["grad_entropy"] = gradient(loss, tokens.entropy)
    result["metrics"] = values_of(algorithm.metrics(tokens, totals))
    result["intermediate"] = intermediates(algorithm, tokens)
    return result


def intermediates(algorithm: alg.Algorithm, tokens: TokenBatch) -> dict[str, Tensor]:
    """Weights by the names that the files use."""
    found: dict[str, Tensor] = {}
    names = {Correction: "importance_sampling_ratio", OffPolicyMask: "off_policy_mask", alg.TopEntropy: "entropy_mask"}
    inner = [getattr(algorithm.objective, name, None) for name in ("correction", "only")]
    for weight in (*algorithm.weights, *inner):
        if type(weight) in names:
            found[names[type(weight)]] = weight(tokens)
    if isinstance(algorithm.objective, alg.VESPO):
        found["gamma_weights"] = algorithm.objective.weight(tokens)
    return {name: weight.squeeze(-1) for name, weight in found.items()}  # one a row is [N] in the files


def option_loss(case: Case) -> dict[str, Any]:
    """An objective by TRL's options."""
    tokens = tokens_of(case)
    options = {"vllm_importance_sampling_correction": False, **case.options(OPTIONS)}
    max_length = int(options.get("max_completion_length") or tokens.mask.shape[1])
    return judge_loss(alg.from_options(**options), tokens, max_length)


def gmpo(case: Case) -> dict[str, Any]:
    tokens, share = tokens_of(case), case.option("top_entropy_quantile", 1.0)
    only = alg.TopEntropy(share) if share < 1 else None
    objective = alg.GMPO(case.option("epsilon", 0.4), case.option("epsilon_high"), only=only)
    algorithm = alg.gmpo(kl=case.option("beta", 0.0), correction=None).replace(objective=objective)
    return judge_loss(algorithm, tokens, tokens.mask.shape[1])


def rloo(case: Case) -> dict[str, Any]:
    """RLOO's loss, or, where rewards are given, its advantages."""
    if "rewards" in case.inputs:
        return rloo_advantage(case)
    tokens = tokens_of(case)
    algorithm = alg.rloo(low=case.option("epsilon", 0.2), high=case.option("epsilon_high"), kl=None, correction=None)
    return judge_loss(algorithm, tokens, tokens.mask.shape[1])


def adaptive_entropy(case: Case) -> dict[str, Any]:
    """The same tokens step after step, with other entropies and the coefficient that the last step left."""
    base, steps = tokens_of(case), case.need("entropy_per_step")
    algorithm = alg.from_options(**{"vllm_importance_sampling_correction": False, **case.options(OPTIONS)})
    totals = Totals.of(base.mask, base.group, base.mask.shape[1])
    memory, losses, after = algorithm.initial_controllers(), [], []
    for step, entropy in enumerate(steps, start=1):
        tokens = TokenBatch(**{**base.tensors(), "entropy": entropy})
        now = algorithm.resolve(memory)
        losses.append(now.loss(tokens, totals).item())
        memory = algorithm.advance(memory, StepReport(step=step, metrics=now.metrics(tokens, totals)))
        after.append(abs(next(iter(memory.values()))))
    return {"loss_per_step": losses, "entropy_coef_after_step": after}


def scores_of(case: Case, kl: Tensor | None = None, mask: Tensor | None = None) -> Scores:
    """Rewards [N, R] in groups of `num_generations` adjacent rows."""
    rewards, size = case.need("rewards"), int(case.option("num_generations"))
    groups = lambda x: x.reshape(-1, size, *x.shape[1:])
    weights = case.option("reward_weights") or [1.0] * rewards.shape[1]
    return Scores(
        per_function=groups(rewards),
        weights=torch.tensor(weights, dtype=torch.float64),
        mask=torch.ones(*groups(rewards).shape[:2], 1, dtype=torch.bool) if mask is None else groups(mask.bool()),
        kl=None if kl is None else groups(kl),
    )


def measured_rewards(scores: Scores) -> dict[str, float]:
    """What the library says of a batch of scored groups."""
    empty = torch.zeros(0, dtype=torch.long)
    completions = tuple(
        Completion(token_ids=empty, text="", finish="stop") for _ in range(scores.per_function.shape[1])
    )
    groups = [
        Group(prompt=Prompt(uid=str(p), token_ids=()), completions=completions, rewards=rewards)
        for p, rewards in enumerate(scores.per_function)
    ]
    names = [f"r{i}" for i in range(scores.per_function.shape[-1])]
    measured = values_of(reward_metrics(groups, names, scores.weights))
    return {**measured, "frac_reward_zero_std": tied_share(scores.total)}


def group_advantage(case: Case) -> dict[str, Any]:
    options = case.options(("scale_rewards", "multi_objective_aggregation"))
    algorithm, scores = alg.from_options(**options), scores_of(case)
    advantages, _ = algorithm.judge(scores)
    metrics = measured_rewards(scores)
    if "normalize_then_sum" in options.values():  # TRL then looks at the one deviation of the batch
        metrics["frac_reward_zero_std"] = float(not advantages.any())
    elif options.get("scale_rewards") == "batch":
        metrics["frac_reward_zero_std"] = tied_share(scores.total.reshape(1, -1))
    return {"advantages": advantages.reshape(-1), "metrics": metrics}


def tied_share(rewards: Tensor) -> float:
    """Share of rows with at least two rewards, all equal: TRL calls the deviation of one reward undefined, not 0."""
    return (is_tied(rewards).squeeze(-1) & ((~rewards.isnan()).sum(-1) > 1)).double().mean().item()


def rloo_advantage(case: Case) -> dict[str, Any]:
    beta, clip = case.option("beta", 0.0), case.option("reward_clip_range")
    old, ref, mask = case.tensor("old_logp"), case.tensor("ref_logp"), case.tensor("mask")
    penalty = None
    metrics: dict[str, float] = {}
    if old is not None and ref is not None and mask is not None and beta:
        kl = alg.KL(alg.k1, beta, where="reward")
        penalty = kl.penalty(old, ref)
        metrics["kl"] = Mean.of(kl.estimator(old, ref), mask.bool()).value
    scores = scores_of(case, penalty, mask)
    advantage = alg.LeaveOneOut(None if clip is None else tuple(clip), bool(case.option("normalize_advantages", False)))
    advantages, _ = alg.rloo(kl=None).replace(advantage=advantage).judge(scores)
    return {"advantages": advantages.reshape(-1), "metrics": {**measured_rewards(scores), **metrics}}


def reference_sync(case: Case) -> dict[str, Any]:
    rule = alg.Every(int(case.option("ref_model_sync_steps", 512)), case.option("ref_model_mixup_alpha", 0.6))
    reference, seen = case.need("reference"), []
    for step, policy in enumerate(case.need("policy_per_step"), start=1):
        reference = mixed(reference, policy, rule(StepReport(step=step, metrics={})))
        seen.append(reference)
    return {"reference_per_step": torch.stack(seen)}


BY_NAME: dict[str, Callable[[Case], dict[str, Any]]] = {
    "gmpo": gmpo,
    "rloo": rloo,
    "adaptive_entropy": adaptive_entropy,
    "group_advantage": group_advantage,
    "reference_sync": reference_sync,
}


def adapter(case: Case) -> Callable[[Case], dict[str, Any]]:
    """By the case's kind; where that is the name of an algorithm, by its loss_type."""
    if case.algorithm in BY_NAME:
        return BY_NAME[case.algorithm]
    if "loss_type" in case.config:
        return option_loss
    raise UnknownCaseError(f"algorithm {case.algorithm!r} of TRL is not known")
