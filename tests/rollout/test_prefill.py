"""Prompts are attended to one after the other without padding, by kernels and by PyTorch's operations, with the same result."""

import pytest
import torch

from covey.kernels import compile as compiled
from covey.kernels import packed_attention
from covey.kernels.decode import decode_kernels
from covey.rollout.attention import causal
from covey.rollout.batches import PrefillBatch
from covey.rollout.kv_cache import KVCache, LayerShape
from covey.rollout.softmax_attention import ScoreRule

CPU = torch.device("cpu")
REASON = compiled.unavailable_reason()
LENGTHS, BEYOND, WIDTH, HEADS, REPEATS = (7, 0, 150, 33), 5, 32, 2, 3
"""Prompts of less than a block, of no tokens, of several blocks; and tokens that only round their number up."""
TOKENS = sum(LENGTHS) + BEYOND
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

with_and_without = pytest.mark.parametrize(
    "by_kernels",
    [False, pytest.param(True, marks=pytest.mark.skipif(REASON is not None, reason=str(REASON)))],
    ids=["operations", "kernels"],
)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def prefill(dtype, by_kernels, lengths=LENGTHS, context=4096):
    kernels = decode_kernels(CPU, dtype, WIDTH) if by_kernels else None
    cache = KVCache([LayerShape(HEADS, WIDTH)], CPU, dtype, context, kernels)
    cache.add_prompts([3])  # one that is there already
    return PrefillBatch(cache, cache.add_prompts(list(lengths)))


def numbers(dtype, tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, WIDTH, generator=generator).to(dtype) for heads in (HEADS * REPEATS, HEADS, HEADS)
    ]


def one_by_one(query, key, value, lengths=LENGTHS):
    """[M, Hq, D] of each prompt alone, in float32."""
    out, start = torch.zeros(query.shape), 0
    for length in lengths:
        alone = (x[None, start : start + length].float().transpose(1, 2) for x in (query, key, value))
        if length:
            out[start : start + length] = causal(*alone, ScoreRule(0.2))[0]
        start += length
    return out


@with_and_without
@dtypes
def test_each_prompt_attends_to_itself_alone_and_what_is_beyond_gets_zeros(dtype, by_kernels):
    given = numbers(dtype)
    found = prefill(dtype, by_kernels).attend_end_to_end(0, *given, 0.2)
    torch.testing.assert_close(found.float(), one_by_one(*given), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not found[sum(LENGTHS) :].any()


@with_and_without
@dtypes
def test_padded_prompts_give_the_same(dtype, by_kernels):
    lengths = (40, 40)  # where none is shorter, padded prompts stand end to end too
    given = numbers(dtype, 80)
    padded = [x.unflatten(0, (2, 40)).transpose(1, 2) for x in given]
    found = prefill(dtype, by_kernels, lengths).attend(0, *padded, ScoreRule(0.2))
    expected = one_by_one(*given, lengths).unflatten(0, (2, 40))
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@with_and_without
@pytest.mark.parametrize("is_last", [False, True], ids=["attended", "only kept"])
def test_keys_and_values_are_kept_in_the_slots_of_their_prompts(is_last, by_kernels):
    batch = prefill(torch.float32, by_kernels)
    query, key, value = numbers(torch.float32)
    if is_last:
        batch.keep_end_to_end(0, key, value)
    else:
        batch.attend_end_to_end(0, query, key, value, 0.2)
    slab, start = batch.cache.prefix[0], 0
    for slot, length in zip(batch.slots, LENGTHS, strict=True):
        for kind, x in enumerate((key, value)):
            assert torch.equal(slab[kind, slot, :, :length], x[start : start + length].transpose(0, 1))
        assert not slab[:, slot, :, length:].any()
        start += length
    assert not slab[:, 0].any(), "the prompt that was there is left alone"


def test_prompts_up_to_the_context_are_not_padded_beyond_it():
    batch = prefill(torch.float32, False, (7, 45), context=45)
    given = numbers(torch.float32, 52)
    torch.testing.assert_close(batch.attend_end_to_end(0, *given, 0.2), one_by_one(*given, (7, 45)))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_kernels_do_it_where_they_decode(monkeypatch):
    prefill(torch.bfloat16, True).attend_end_to_end(0, *numbers(torch.bfloat16), 0.2)  # the first call checks them too
    calls = []
    forward = packed_attention.PackedAttention.forward
    monkeypatch.setattr(
        packed_attention.PackedAttention, "forward", lambda *given: calls.append(given) or forward(*given)
    )
    prefill(torch.bfloat16, True).attend_end_to_end(0, *numbers(torch.bfloat16), 0.2)
    assert len(calls) == 1
    prefill(torch.bfloat16, False).attend_end_to_end(0, *numbers(torch.bfloat16), 0.2)
    assert len(calls) == 1, "who decodes with PyTorch's operations computes prompts with them"
