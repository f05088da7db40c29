"""Log-probabilities of a prompt's own tokens by one forward pass in the sampler's precision, returned by `echo` with `logprobs`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.kernels import cache_keyword
from covey.models import evaluating, unwrapped
from covey.rollout import NativeSampler
from covey.rollout.autocast import expect_precision, in_precision
from covey.rollout.live import Top

LOGITS = 2**25
"""Logits that are held at once."""

Scored = tuple[float, Top]
"""Log-probability of a token after those before it, and the likeliest tokens there."""


def score_prompt(sampler: NativeSampler, prompt: Sequence[int], num_top: int) -> list[Scored]:
    """Its tokens from the second on: the first has nothing before it. At temperature 1.

    In pieces with a cache, so that the logits of a long prompt fit.
    """
    from transformers import DynamicCache

    inner = unwrapped(sampler.model)
    ids = torch.tensor([list(prompt)], device=next(inner.parameters()).device)
    keyword, last = cache_keyword(inner), len(prompt) - 1
    cached = keyword in ("cache", "past_key_values")
    extra = {str(keyword): DynamicCache(config=inner.config), "use_cache": True} if cached else {}
    size = max(1, LOGITS // int(inner.config.get_text_config().vocab_size)) if cached else max(1, last)
    scored: list[Scored] = []
    precision = expect_precision(sampler.model, str(sampler.forward.dtype).removeprefix("torch."))
    with evaluating(sampler.model), in_precision(sampler.model, precision):
        for start in range(0, last, size):
            stop = min(start + size, last)
            logits = inner(input_ids=ids[:, start:stop], **extra).logits
            scored += _rows(logits[0], ids[0, start + 1 : stop + 1], num_top)
    return scored


def _rows(logits: Tensor, token_ids: Tensor, num_top: int) -> list[Scored]:
    """Of the tokens [K] that follow, from `logits` [K, V]."""
    logprobs = logits.float().log_softmax(-1)
    drawn = logprobs.gather(-1, token_ids[:, None]).squeeze(-1).tolist()
    best = logprobs.topk(min(num_top, logprobs.shape[-1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(logprob, tuple(zip(*top, strict=True))) for logprob, top in zip(drawn, tops, strict=True)]
