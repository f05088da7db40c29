"""Tokens drawn by the compiled kernel: the same as by PyTorch's operations, at every uniform and in every type."""

import ctypes
import math

import pytest
import torch

from covey.compiled import NUMBERS, built, why_not
from covey.rollout import SamplingParams, sampling
from covey.rollout.drawing import SOURCE, Kernels, kernels_for
from covey.rollout.sampling import draw
from kit import AVX2_ALONE, threads

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def by_operations(monkeypatch, *given, **options):
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "kernels_for", lambda logits: None)
        return draw(*given, **options)


@pytest.fixture
def logits():
    return torch.randn(40, 701, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 16, 256, 257, 512, 701])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_and_log_probabilities_are_those_of_pytorchs_operations(logits, dtype, size, temperature, monkeypatch):
    logits, params = logits[:, :size].to(dtype), SamplingParams(temperature=temperature)
    assert kernels_for(logits) is not None
    points = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine, theirs = draw(logits, points, params), by_operations(monkeypatch, logits, points, params)
    assert torch.equal(mine.tokens, theirs.tokens)
    torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=2e-6, rtol=1e-6)


def test_what_is_truncated_or_penalized_is_drawn_from_what_is_left(logits, monkeypatch):
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    seen = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) < 0.1
    points = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = draw(logits, points, params, seen=seen)
    theirs = by_operations(monkeypatch, logits, points, params, seen=seen)
    assert torch.equal(mine.tokens, theirs.tokens)
    torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=2e-6, rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [["-mno-avx512bf16"], AVX2_ALONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_for_an_older_processor_is_the_same(logits, dtype, flags, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = Kernels(ctypes.CDLL(str(built(SOURCE, (f"NUMBER={NUMBERS[dtype]}",), flags))))
    points = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = plain.draw(logits.to(dtype), points, 0.7)
    expected = kernels_for(logits.to(dtype)).draw(logits.to(dtype), points, 0.7)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs, expected[1], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("place", [0, 15, 255, 256, 699])
def test_a_token_that_cannot_be_drawn_never_is(u, place):
    logits = torch.full((1, 700), -math.inf)
    logits[0, place] = -5.0
    drawn = draw(logits, torch.tensor([u], dtype=torch.float64), SamplingParams())
    assert drawn.tokens.item() == place
    assert drawn.logprobs.item() == 0.0


@pytest.mark.parametrize("size", [16, 300, 701])
@pytest.mark.parametrize("row", [3, 39])
def test_a_row_without_any_possible_token_says_so_and_stays_in_the_vocabulary(logits, size, row):
    logits = logits[:, :size].contiguous()
    logits[row] = -math.inf
    drawn = draw(logits, torch.full((40,), 0.3, dtype=torch.float64), SamplingParams())
    assert drawn.logprobs[row].isnan()
    assert 0 <= int(drawn.tokens[row]) < size


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_a_number_shows_in_the_log_probability(logits, wrong):
    logits[3, 400] = wrong
    drawn = draw(logits, torch.full((40,), 0.3, dtype=torch.float64), SamplingParams())
    assert drawn.logprobs[3].isnan()
    assert 0 <= int(drawn.tokens[3]) < 701
    assert drawn.logprobs[[*range(3), *range(4, 40)]].isfinite().all()


def test_results_do_not_depend_on_the_number_of_threads(logits):
    points, found = torch.rand(40, dtype=torch.float64), []
    for count in (1, 2, 3):
        with threads(count):
            found.append(draw(logits, points, SamplingParams()))
    for other in found[1:]:
        assert torch.equal(found[0].tokens, other.tokens)
        assert torch.equal(found[0].logprobs, other.logprobs)
