"""How far the policy that is trained is from the one that wrote the tokens."""

from __future__ import annotations

import math

from covey.types import EffectiveSize, Max, Mean, Metric, TokenBatch


def sampler_mismatch(tokens: TokenBatch) -> dict[str, Metric]:
    """How far the sampler's log-probabilities are from the learner's: 0 when both are the same model in the same numbers."""
    if tokens.sampler_logp is None:
        return {}
    known = tokens.mask & ~tokens.sampler_logp.isnan()
    gap = (tokens.old_logp - tokens.sampler_logp.nan_to_num(0.0)).abs()
    largest = gap[known].max().item() if bool(known.any()) else math.nan
    return {
        "sampling/sampling_logp_difference/mean": Mean.of(gap, known),
        "sampling/sampling_logp_difference/max": Max(largest),
    }


def effective_size(tokens: TokenBatch) -> dict[str, Metric]:
    """How many of the tokens count once each is weighed by the policy now over the one that drew it: 1 on-policy."""
    drawn = tokens.old_logp if tokens.sampler_logp is None else tokens.sampler_logp
    known = tokens.mask & ~drawn.isnan()
    ratio = (tokens.logp.detach() - drawn)[known].clamp(-20.0, 20.0).exp()
    return {"sampling/effective_sample_size": EffectiveSize.of(ratio)}
