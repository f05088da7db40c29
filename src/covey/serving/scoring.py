"""Log-probabilities of a prompt's own tokens by one forward pass in the sampler's precision, returned by `echo` with `logprobs`."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.kernels import cache_keyword
from covey.models import evaluating, unwrapped
from covey.rollout import NativeSampler
from covey.rollout.autocast import expect_precision, in_precision
from covey.rollout.live import Top

BATCH_TOKENS = 1024
"""Tokens that are scored together, padding included."""
LOGITS = 2**25
"""Logits that are held at once."""

Scored = tuple[float, Top]
"""Log-probability of a token after those before it, and the likeliest tokens there."""


def score_prompts(sampler: NativeSampler, prompts: Sequence[Sequence[int]], num_top: int) -> list[list[Scored]]:
    """For each prompt, its tokens from the second on: the first has nothing before it. At temperature 1."""
    scored: list[list[Scored]] = []
    precision = expect_precision(sampler.model, str(sampler.forward.dtype).removeprefix("torch."))
    with evaluating(sampler.model), in_precision(sampler.model, precision):
        for batch in _batches(prompts):
            scored += _score(sampler.model, batch, num_top)
    return scored


def _batches(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for prompt in prompts:
        longest = max(map(len, [*batch, prompt]))
        if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def _score(model: Any, prompts: Sequence[Sequence[int]], num_top: int) -> list[list[Scored]]:
    """Chunks of columns with a cache, so that the logits of long prompts fit; padding on the right is never read."""
    from transformers import DynamicCache

    inner = unwrapped(model)
    device, width = next(inner.parameters()).device, max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(list(prompt))
    ids = ids.to(device)
    size = max(1, LOGITS // (int(inner.config.get_text_config().vocab_size) * len(prompts)))
    keyword = cache_keyword(inner)
    cached = keyword in ("cache", "past_key_values")
    cache = DynamicCache(config=inner.config) if cached else None
    scored: list[list[Scored]] = [[] for _ in prompts]
    for start in range(0, width - 1, size if cached else width):
        stop = min(start + size, width - 1) if cached else width - 1
        extra = {str(keyword): cache, "use_cache": True} if cached else {}
        logits = inner(input_ids=ids[:, start:stop], **extra).logits
        for row, prompt in enumerate(prompts):
            count = min(stop, len(prompt) - 1) - start
            if count > 0:
                scored[row] += _rows(logits[row, :count], ids[row, start + 1 : start + 1 + count], num_top)
    return scored


def _rows(logits: Tensor, token_ids: Tensor, num_top: int) -> list[Scored]:
    """Of the tokens [K] that follow, from `logits` [K, V]."""
    logprobs = logits.float().log_softmax(-1)
    drawn = logprobs.gather(-1, token_ids[:, None]).squeeze(-1).tolist()
    best = logprobs.topk(min(num_top, logprobs.shape[-1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(logprob, tuple(zip(*top, strict=True))) for logprob, top in zip(drawn, tops, strict=True)]
