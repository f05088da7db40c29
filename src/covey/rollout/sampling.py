"""From logits to tokens: one pass in fp32, one uniform a token, log-probability on the way.

A uniform depends on (seed, prompt, index of the completion, position) and on nothing else, so a completion does not change
with the batch it is in. The draw inverts the cumulative distribution by blocks of the vocabulary instead of calling
`multinomial`, which walks the vocabulary once more for each row.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.rollout.sampler import SamplingParams
from covey.rollout.truncation import truncate
from covey.types import precise

BLOCK = 256
"""Tokens per block: the draw picks a block by its summed weight, then a token within it."""


@dataclass(frozen=True, eq=False)
class Draw:
    """One token for each of B rows."""

    tokens: Tensor
    """[B] int64"""
    logprobs: Tensor
    """[B] float32, under the distribution the token was drawn from."""


def draw(
    logits: Tensor,
    uniforms: Tensor,
    params: SamplingParams,
    *,
    seen: Tensor | None = None,
    in_place: bool = False,
) -> Draw:
    """Draw one token a row from `logits` [B, V] with `uniforms` [B] in [0, 1).

    `seen` [B, V] bool marks the tokens that a repetition penalty applies to; it is needed only with one.
    Greedy decoding takes the likeliest token (the first of equals); its log-probability is that at temperature 1.
    `in_place`: `logits` may be overwritten.
    """
    scores = processed(logits, params, seen)  # [B, V]
    top = scores.amax(-1, keepdim=True)
    scores = scores - top if scores is logits and not in_place else scores.sub_(top)
    weights = scores.exp() if params.is_greedy else scores.exp_()  # [B, V], the likeliest is 1
    blocks = _blocks(weights)  # [B, V / BLOCK, BLOCK]
    sums = blocks.sum(-1)
    total = sums.sum(-1)
    tokens = scores.argmax(-1) if params.is_greedy else _invert(blocks, sums, uniforms)
    logprobs = (weights.gather(-1, tokens[:, None]).squeeze(-1) / total).log()
    return Draw(tokens, logprobs)


def processed(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """[B, V] float32 logits of the distribution that `params` describe: -inf where a token cannot be drawn.

    May be `logits` itself when nothing changes it. At temperature 0 only the repetition penalty applies.
    """
    scores = logits.float()
    if params.repetition_penalty != 1.0:
        if seen is None:
            raise ValueError("A repetition penalty needs `seen`, the tokens of prompt and completion so far.")
        penalty = params.repetition_penalty
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if params.is_greedy:
        return scores
    if params.temperature != 1.0:
        scores = scores / params.temperature
    return truncate(scores, params) if params.truncates else scores


def _blocks(weights: Tensor) -> Tensor:
    """[B, V / BLOCK, BLOCK] view of `weights` [B, V], zeros beyond the vocabulary."""
    missing = -weights.shape[-1] % BLOCK
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.contiguous().view(weights.shape[0], -1, BLOCK)


def _invert(blocks: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """[B] int64, the first token whose cumulative weight exceeds `uniforms` [B] times the total.

    Never a token of weight zero, and never beyond the vocabulary: rounding cannot push the target past the last one.
    """
    cumulative = precise(sums).cumsum(-1)  # [B, V / BLOCK]
    target = precise(uniforms)[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)  # [B, 1]
    before = (cumulative.gather(-1, block) - sums.gather(-1, block)).clamp(min=0)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK)).squeeze(1)  # [B, BLOCK]
    token = _first_above(precise(inside).cumsum(-1), target - before)
    return (block * BLOCK + token).squeeze(-1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[B, 1], the first place of `cumulative` [B, K] (rising) above `target` [B, 1]; at least one is always above."""
    least = 1e-12 if cumulative.dtype == torch.float64 else torch.finfo(cumulative.dtype).eps
    target = torch.minimum(target, cumulative[:, -1:] * (1 - least))
    return (cumulative <= target).sum(-1, keepdim=True).clamp_(max=cumulative.shape[-1] - 1)


def fresh_seed(params: SamplingParams) -> int:
    """The seed of `params`, or one from torch's default generator: `torch.manual_seed` makes that one repeat too."""
    return int(torch.randint(2**62, ()).item()) if params.seed is None else params.seed


def sequence_key(seed: int, uid: str, occurrence: int, sample: int) -> int:
    """RNG key of a completion, a signed 64-bit hash of the arguments: equal on every machine."""
    words = f"{seed}\0{occurrence}\0{sample}\0{uid}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little", signed=True)


def uniforms(keys: Sequence[int], positions: int) -> Tensor:
    """[B, positions] float64 in [0, 1): token `t` of completion `keys[b]` is drawn with entry `[b, t]`.

    SplitMix64 (Steele, Lea and Flood 2014) with the key as state and the position as counter.
    """
    counter = torch.arange(1, positions + 1, dtype=torch.int64)
    z = torch.tensor(list(keys), dtype=torch.int64)[:, None] + counter * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).double() * 2.0**-53


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own copies the sign."""
    return (z >> bits).bitwise_and(2 ** (64 - bits) - 1)
