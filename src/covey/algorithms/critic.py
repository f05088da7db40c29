"""The value loss of PPO: squared error between the critic's estimate at each token and the return."""

from collections.abc import Callable
from dataclasses import field, replace
from typing import Literal

import torch
from torch import Tensor

from covey.algorithms.aggregation import token_mean
from covey.declared import Bound, NotNegative, checked_dataclass
from covey.types import Aggregate, TokenBatch, Totals


@checked_dataclass(frozen=True)
class ClippedError:
    """`0.5 max((v - R)^2, (clip(v, V - clip, V + clip) - R)^2)` of each token. PPO, Schulman et al. 2017; as in verl.

    v are `tokens.values`, V the estimates at the time of the rollout, R `tokens.returns`. `clip=None`: `0.5 (v - R)^2`.
    """

    clip: Bound | None = 0.2

    def __call__(self, tokens: TokenBatch) -> Tensor:
        plain, clipped = self._squares(tokens)
        return 0.5 * torch.maximum(plain, clipped)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """`value/clip_ratio`: tokens where the clipped error is the larger one."""
        plain, clipped = self._squares(tokens)
        return {"value/clip_ratio": clipped > plain}

    def _squares(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        values, returns = values_and_returns(tokens)
        plain = (values - returns).square()
        if self.clip is None or tokens.old_values is None:
            return plain, plain
        near = values.clamp(tokens.old_values - self.clip, tokens.old_values + self.clip)
        return plain, (near - returns).square()


def with_targets(tokens: TokenBatch) -> TokenBatch:
    """The tokens without those whose target is NaN."""
    if tokens.returns is None:
        return tokens
    return replace(tokens, mask=tokens.mask & ~tokens.returns.isnan(), returns=tokens.returns.nan_to_num(0.0))


def values_and_returns(tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """[N, T] each. Raises ValueError where the batch has none."""
    if tokens.values is None or tokens.returns is None:
        raise ValueError("A critic needs the values and returns of the tokens; this batch has none.")
    return tokens.values, tokens.returns


@checked_dataclass(frozen=True)
class Critic:
    """A critic: `coefficient x aggregate(error(tokens))` is added to the loss. Your own is another `error`: -> [N, T].

    Having one makes the trainer keep a value model and hand `values`, `old_values` and `returns` to every part. `model="head"`
    is a linear map of the policy's own hidden states, which costs next to nothing and never changes the policy;
    `"separate"` a second model, trained whole, that starts as a copy of the policy's decoder.
    """

    error: Callable[[TokenBatch], Tensor] = field(default_factory=ClippedError)
    coefficient: NotNegative = 1.0
    aggregate: Aggregate = token_mean
    model: Literal["head", "separate"] = "head"

    def loss(self, tokens: TokenBatch, totals: Totals) -> Tensor:
        """Scalar share of this micro-batch; completions without a target, which nobody scored, have none."""
        tokens = with_targets(tokens)
        per_token = self.error(tokens)
        if per_token.shape != tokens.mask.shape:
            raise ValueError(
                f"The critic's error returned shape {list(per_token.shape)}; it must return the error at each token, "
                f"{list(tokens.mask.shape)}."
            )
        return self.coefficient * self.aggregate(per_token, tokens, totals)
