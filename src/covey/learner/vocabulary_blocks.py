"""Backward of the LM head of an accelerator: a block of the vocabulary at a time, for all tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.learner.lm_head import LogitTransform, logit_gradient


def by_vocabulary(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
    saved: tuple[Tensor, Tensor, Tensor],
    slopes: tuple[Tensor | None, Tensor | None],
    wants: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Requested gradients of hidden [M, D], weight [V, D] and bias [V], a block of the vocabulary at a time.

    `saved`: targets, normalizers and entropies of all tokens, each [M]. Only `hidden`'s gradient [M, D] is summed over blocks, in
    float32 or wider; the weight's gradient is one matmul per block, rounded once. So a micro-batch moves `blocks x M x D`
    numbers through memory where chunks of tokens move `chunks x V x D`, at the same number of parts.
    """
    (targets, normalizer, entropy), (tokens, vocabulary) = saved, (hidden.shape[0], weight.shape[0])
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.zeros_like(hidden, dtype=wide) if wants[0] else None
    of_weight = torch.empty_like(weight) if wants[1] else None
    of_bias = torch.empty_like(bias) if wants[2] and bias is not None else None
    size = block_of(transform.chunk, tokens, vocabulary)
    of_logp, of_entropy = slopes
    if transform.kernels is not None and of_logp is not None and of_entropy is None:
        of_entropy = torch.zeros_like(of_logp)  # none is 0, in one kernel
    for start in range(0, vocabulary, size):
        part = slice(start, min(start + size, vocabulary))
        rows = weight[part]
        product = hidden @ rows.t() if bias is None else torch.addmm(bias[part], hidden, rows.t())
        if transform.kernels is not None and of_logp is not None and of_entropy is not None:
            of = of_logp, of_entropy
            narrow = transform.kernels.slopes(product, targets - start, (normalizer, entropy), of, transform.constants)
        else:
            logits = transform.logits_(product.to(wide))
            inside = (targets >= start) & (targets < part.stop)
            place = (targets - start).clamp(0, rows.shape[0] - 1)
            gradient = logit_gradient(
                logits, torch.empty_like(logits), transform, (place, normalizer, entropy), slopes, inside
            )
            narrow = gradient.to(hidden.dtype)
            del logits, gradient
        if total is not None:
            total += narrow @ rows
        if of_weight is not None:
            torch.mm(narrow.t(), hidden, out=of_weight[part])
        if of_bias is not None:
            of_bias[part] = narrow.sum(0, dtype=wide)
        del product, narrow  # freed before the next block's
    return None if total is None else total.to(hidden.dtype), of_weight, of_bias


def block_of(chunk: int, tokens: int, vocabulary: int) -> int:
    """Vocabulary entries per block for all `tokens`, with as many logits as `chunk` tokens of the whole vocabulary; at least 128."""
    return min(vocabulary, max(128, chunk * vocabulary // max(1, tokens) // 128 * 128))
