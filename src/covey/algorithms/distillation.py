"""Distillation: a term that draws the policy to a teacher's distribution, token by token, on the policy's own completions.

The learner measures the divergence over the whole vocabulary, a chunk of logits at a time; an algorithm sees one number a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from covey.algorithms.control import Controller, current
from covey.algorithms.teacher_signals import informed
from covey.algorithms.teachers import TeacherRole
from covey.declared import Count, Finite, Measured, NotNegative, Positive, Range, checked_dataclass
from covey.errors import ConfigError
from covey.types import Aggregate, Mean, Metric, TokenBatch, Totals

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


def reverse_kl(logp: Tensor, teacher: Tensor) -> Tensor:
    """`sum_v p (log p - log q)` [m] of the policy's p and the teacher's q, log-probabilities [m, V]: seeks q's modes."""
    return _expected(logp, logp - teacher)


def forward_kl(logp: Tensor, teacher: Tensor) -> Tensor:
    """`sum_v q (log q - log p)` [m]: covers all of q."""
    return _expected(teacher, teacher - logp)


def jensen_shannon(logp: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """`beta KL(q, m) + (1 - beta) KL(p, m)`, `m = beta q + (1 - beta) p`, [m]. GKD, Agarwal et al. 2024, eq. 1."""
    middle = mixture(logp, teacher, beta)
    return beta * _expected(teacher, teacher - middle) + (1 - beta) * _expected(logp, logp - middle)


def mixture(logp: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Log-probabilities of `beta q + (1 - beta) p`, [m, V]."""
    shares = logp.new_tensor([beta, 1 - beta]).log()
    return torch.logaddexp(teacher + shares[0], logp + shares[1])


def _expected(logp: Tensor, value: Tensor) -> Tensor:
    """[m] mean of `value` [m, V] under the distribution; tokens of probability 0 count 0."""
    return (logp.exp() * value.masked_fill(logp == -torch.inf, 0.0)).sum(-1)


def coarse(logp: Tensor, chosen: Tensor) -> Tensor:
    """[m, k + 1]: log-probabilities of the chosen tokens [m, k], and of all others together."""
    return _with_rest(logp.gather(-1, chosen))


def _with_rest(top: Tensor) -> Tensor:
    """[m, k + 1]: log-probabilities [m, k] of some tokens, and of all others together."""
    rest = (1.0 - top.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(top.dtype).eps)
    return torch.cat([top, rest.log()], -1)


@checked_dataclass(frozen=True)
class Distill(TeacherRole):
    """`weight x divergence(policy, teacher)` of each token of the policy's own completions, exact over the vocabulary.

    On-policy distillation: Agarwal et al. 2024, "GKD", <https://arxiv.org/abs/2306.13649>. It is a teacher's role with a
    divergence: with `"policy"` and `feedback` the policy reads the prompt with the feedback and teaches the one that does
    not (SDPO, Huebotter et al. 2026, <https://arxiv.org/abs/2601.20802>). Several teachers: the average of their
    divergences. Both distributions are taken at the sampling temperature.
    """

    weight: Positive | Controller = 1.0
    divergence: Divergence = "reverse_kl"
    beta: Finite = 0.5
    """The teacher's share of the mixture in `jsd`."""
    top_k: Annotated[int, Range(at_least=1, why="None takes the whole vocabulary.")] | None = None
    """Distinguish only the k likeliest tokens of the distribution that the divergence is a mean under, and count the rest as
    one outcome; None: the whole vocabulary. An endpoint tells its own k likeliest tokens."""
    entropy_sensitivity: NotNegative = 0.0
    """Weigh each token with feedback by `exp(-entropy_sensitivity H)`, H the entropy of the teacher there, over the mean of these
    weights in the step (SRPO, Li et al. 2026, section 3.2, <https://arxiv.org/abs/2604.02288>). 0: all alike."""
    overlap_k: Count | None = None
    """Measure `teacher/overlap`, the share of the policy's k likeliest tokens that are among the teacher's (Li et al. 2026, "Rethinking
    On-Policy Distillation", <https://arxiv.org/abs/2604.13016>, and its code). None: not, which is cheaper."""
    mean_weight: Measured | None = None
    """The mean of these weights, set by `prepare`."""
    aggregate: Aggregate | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence == "jsd" and not 0.0 < self.beta < 1.0:
            raise ConfigError(
                f"distill's beta={self.beta} must be between 0 and 1; the ends are reverse_kl and forward_kl."
            )
        if self.overlap_k is not None and self.is_endpoint and self.overlap_k > (self.top_k or 0):
            raise ConfigError(f"distill's overlap_k={self.overlap_k} is of an endpoint at most its top_k={self.top_k}.")
        if self.is_endpoint and self.top_k is None:
            raise ConfigError(
                f"distill's teacher {self.teacher} is an endpoint, which tells its likeliest tokens and not all of its distribution; "
                "say how many, with top_k=20 (most servers allow no more)."
            )
        is_alone = not isinstance(self.teacher, (Mapping, list, tuple))
        if self.entropy_sensitivity and (self.is_endpoint or self.feedback is None or not is_alone):
            raise ConfigError(
                f"distill's entropy_sensitivity={self.entropy_sensitivity} takes a teacher with feedback that is loaded here."
            )

    def __call__(self, tokens: TokenBatch) -> Tensor:
        measured = self._measured(tokens)
        if self.is_stepwise:
            mean = self._mean_weight(tokens) if self.mean_weight is None else self.mean_weight
            measured = measured * _weights(tokens) / mean
        return current(self.weight) * measured

    @property
    def is_stepwise(self) -> bool:
        """True if weights need the mean of the whole step."""
        return self.entropy_sensitivity > 0

    def prepare(self, tokens: TokenBatch, totals: Totals) -> Distill:
        """The term with the mean weight of the whole step."""
        return replace(self, mean_weight=self._mean_weight(tokens)) if self.is_stepwise else self

    def _mean_weight(self, tokens: TokenBatch) -> float:
        weights = _weights(tokens)
        weights = weights[tokens.mask & (weights > 0)]
        return weights.mean().item() if weights.numel() else 1.0

    def distance(self, logp: Tensor, teacher: Tensor) -> Tensor:
        """[m], the divergence of log-probabilities [m, V], with gradient to the policy's."""
        if self.top_k is not None and self.top_k < logp.shape[-1]:
            under = {"reverse_kl": logp, "forward_kl": teacher}.get(self.divergence)
            under = mixture(logp, teacher, self.beta) if under is None else under
            chosen = under.detach().topk(self.top_k, -1).indices
            logp, teacher = coarse(logp, chosen), coarse(teacher, chosen)
        return self._between(logp, teacher)

    def distance_to_likeliest(self, logp: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
        """[m], as `distance`, of log-probabilities [m, V] to a teacher of which the likeliest tokens are known.

        `ids` [m, k] with their log-probabilities `teacher` [m, k]; -inf, or an id beyond V, is no token. All others count as one outcome.
        """
        teacher = teacher.masked_fill(ids >= logp.shape[-1], -torch.inf)
        top = logp.gather(-1, ids.clamp(max=logp.shape[-1] - 1)).masked_fill(teacher == -torch.inf, -torch.inf)
        return self._between(_with_rest(top), _with_rest(teacher))

    def _between(self, logp: Tensor, teacher: Tensor) -> Tensor:
        if self.divergence == "jsd":
            return jensen_shannon(logp, teacher, self.beta)
        return (reverse_kl if self.divergence == "reverse_kl" else forward_kl)(logp, teacher)

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor | Metric]:
        """`distill/<divergence>`, the mean of a token, and `teacher/overlap` where it is measured."""
        overlap = tokens.teacher_overlap
        counted = tokens.mask & (informed(tokens) > 0)
        return {
            f"distill/{self.divergence}": self._measured(tokens),
            **({} if overlap is None else {"teacher/overlap": Mean.of(overlap, counted)}),
        }

    def _measured(self, tokens: TokenBatch) -> Tensor:
        if tokens.teacher_distance is None:
            raise ValueError("distill needs teacher_distance, measured by the learner; this batch has none.")
        return tokens.teacher_distance * informed(tokens)


def _weights(tokens: TokenBatch) -> Tensor:
    if tokens.teacher_weight is None:
        raise ValueError("distill needs teacher_weight, measured by the learner; this batch has none.")
    return tokens.teacher_weight


def distill(teacher: Any, weight: float | Controller = 1.0, **options: Any) -> Distill:
    """Distillation as a regularizer: `alg.grpo().replace(regularizers=(alg.distill("big-model"),))`; options of `Distill`."""
    return Distill(teacher, weight=weight, **options)


def zero(tokens: TokenBatch) -> Tensor:
    """An objective without a policy gradient, for learning from a teacher or from examples alone. [N, T]"""
    return torch.zeros_like(tokens.logp)


zero.scales_with_advantage = True  # type: ignore[attr-defined]
zero.ignores_rewards = True  # type: ignore[attr-defined]
zero.exempt = ("policy_gradient",)  # type: ignore[attr-defined]
