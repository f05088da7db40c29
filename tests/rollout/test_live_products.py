"""Products with float32 weights as they stand, and a decode step of them in one call, on processors without AVX-512."""

from itertools import product

import pytest
import torch
from plain_sampling import TEXTS, ids_of
from torch.nn import functional as F

from covey.kernels import compile as compiled
from covey.kernels import decode
from covey.kernels import matmul_fp32 as live
from covey.kernels.decode import DecodeKernels
from covey.rollout import NativeSampler, SamplingParams, decoder
from kit import forgotten, live_kernels, rest_nightly, threads, tiny_model, tiny_tokenizer

needs_kernels = pytest.mark.skipif(compiled.unavailable_reason() is not None, reason="kernels cannot be compiled here")
PARAMS = SamplingParams(max_tokens=90, seed=3)
"""Long enough for buffers to grow, with completions that end on the way."""


@pytest.fixture(scope="module")
def kernels():
    return live_kernels()


@pytest.fixture
def here(kernels, monkeypatch):
    monkeypatch.setattr(decode, "fp32_matmul", lambda: kernels)


@pytest.fixture
def one_by_one(monkeypatch):
    """Ends the whole step: layers are PyTorch's products."""
    return lambda: monkeypatch.setattr(decoder.DecodeWeights, "of", lambda *weights: None)


def drawn(model, *, params=PARAMS, **given):
    """Groups of five completions, and the sampler."""
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", **given)
    return list(sampler.sample(TEXTS, 5, params)), sampler


def assert_same(found, expected, tolerance=1e-5):
    assert ids_of(found) == ids_of(expected)
    for one, two in zip(found, expected, strict=True):
        for a, b in zip(one.completions, two.completions, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=tolerance, rtol=0)


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inside", "outside"), [(16, 1), (40, 27), (64, 112), (640, 64), (2048, 80)])
def test_any_number_of_rows_is_multiplied_as_pytorch_does(inside, outside, bias, kernels):
    torch.manual_seed(0)
    weight, added = torch.randn(outside, inside), torch.randn(outside) if bias else None
    near = lambda found, expected: torch.testing.assert_close(found, expected, atol=3e-6 * inside, rtol=1e-5)
    for rows in (1, 7, 8, 9, 15, 16, 17, 24, 25, 32, 100):
        x = torch.randn(rows, inside)
        near(kernels.multiply(x, weight, added), F.linear(x, weight, added))


@needs_kernels
def test_a_rows_numbers_are_the_same_bits_whatever_is_computed_beside_it(kernels):
    torch.manual_seed(0)
    x, weight = torch.randn(70, 96), torch.randn(50, 96)
    whole = kernels.multiply(x, weight)
    for first, count in ((0, 1), (3, 9), (16, 16), (5, 60)):
        some = kernels.multiply(x[first : first + count].contiguous(), weight)
        assert some.equal(whole[first : first + count])


@needs_kernels
def test_what_is_not_a_number_stays_in_its_row(kernels):
    x, weight = torch.ones(20, 16), torch.ones(9, 16)
    x[4, 3] = float("nan")
    found = kernels.multiply(x, weight)
    assert found[4].isnan().all()
    assert found[torch.arange(20) != 4].isfinite().all()


@needs_kernels
@pytest.mark.parametrize(
    "arch, rows",  # 256: all at once; 7: as rows come free
    rest_nightly(product(["qwen2", "qwen3", "llama", "mistral"], [256, 7]), {("qwen3", 256)}),
)
def test_a_step_in_one_call_draws_the_same_tokens(arch, rows, here, one_by_one):
    model = tiny_model(arch, hidden=64, layers=3)
    whole, sampler = drawn(model, max_rows=rows)
    assert sampler.forward.weights is not None
    one_by_one()
    parts, sampler = drawn(model, max_rows=rows)
    assert sampler.forward.weights is None
    assert len({len(c.token_ids) for group in whole for c in group.completions}) > 1
    assert_same(whole, parts)


@needs_kernels
@pytest.mark.parametrize("count", [1, 3])
def test_threads_change_nothing(count, here):
    model = tiny_model(hidden=64, layers=2)
    expected, _ = drawn(model)
    with threads(count):
        assert_same(drawn(model)[0], expected, 0)


@needs_kernels
def test_weights_that_were_trained_since_are_sampled_with(here):
    model = tiny_model(hidden=64, layers=2)
    before, sampler = drawn(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    sampler.load(model, 1)
    after = list(sampler.sample(TEXTS, 5, PARAMS))
    assert ids_of(after) != ids_of(before)
    assert_same(after, drawn(model)[0], 0)


@needs_kernels
@pytest.mark.parametrize("change", ["turned", "wider"])
def test_weights_that_do_not_stand_as_the_kernels_read_them_are_left_to_pytorch(change, here):
    """A weight whose rows are not contiguous, and layers of different sizes."""
    model, params = tiny_model(hidden=64, layers=2), SamplingParams(max_tokens=5, seed=0)
    mlp = model.model.layers[1].mlp
    if change == "turned":
        mlp.up_proj.weight.data = mlp.up_proj.weight.data.t().contiguous().t()
    else:
        for name in ("gate_proj", "up_proj"):
            setattr(mlp, name, torch.nn.Linear(64, 96, bias=False))
        mlp.down_proj = torch.nn.Linear(96, 64, bias=False)
    found, sampler = drawn(model, params=params)
    assert sampler.forward.weights is None
    assert sampler.kernels is not None, "attention is still the kernels'"
    assert sum(len(group.completions) for group in found) == 5 * len(TEXTS)


@needs_kernels
def test_a_step_that_computes_something_else_is_found_out(here, monkeypatch, caplog):
    honest = DecodeKernels.decode
    monkeypatch.setattr(DecodeKernels, "decode", lambda self, *given: honest(self, *given) * 0.5)
    _, sampler = drawn(tiny_model(hidden=64, layers=2), params=SamplingParams(max_tokens=2, seed=0))
    assert sampler.kernels is None
    assert "not with compiled kernels: the engine's logits differ" in caplog.text


def test_with_avx512_the_products_are_left_to_libraries(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with forgotten(live.fp32_matmul):
        assert live.fp32_matmul() is None
