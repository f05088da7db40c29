"""Products of the sampler's own bfloat16 copy: those of the layers, for any number of rows, and left to oneDNN where they are not."""

import logging

import pytest
import torch
from plain_sampling import TEXTS, ids_of
from torch.nn import functional as F

from covey.kernels import compile as compiled
from covey.kernels import matmul_bf16 as pairs
from covey.kernels import sampler_linear as linear
from covey.kernels.matmul_bf16 import Epilogue
from covey.kernels.sampler_linear import Bf16PairLinear, InPlaceLinear, OneDnnLinear
from covey.rollout import NativeSampler, SamplingParams
from kit import forgotten, threads, tiny_model, tiny_tokenizer

needs_kernel = pytest.mark.skipif(pairs.bf16_matmul() is None, reason="no kernel for this processor or compiler")
needs_bfloat16 = pytest.mark.skipif(
    not linear.has_bfloat16(torch.device("cpu")), reason="this processor has no bfloat16 arithmetic"
)
SIZES = [(32, 16), (30, 48), (64, 112), (640, 64), (2048, 80)]
"""Inputs and outputs: less than a column of panels, whole ones, and one to three panels beyond."""
ROWS = [1, 2, 5, 6, 7, 64, 191, 192, 193, 400]
"""Around a band of six rows, and around a block of rows."""


@pytest.fixture
def fresh():
    """Whether there is a kernel is found out again, and forgotten afterwards."""
    with forgotten(pairs.bf16_matmul, compiled.load):
        yield


def layer_of(inside, outside, *, bias=True, seed=0):
    torch.manual_seed(seed)
    layer = torch.nn.Linear(inside, outside, bias=bias)
    layer.weight.data, half = layer.weight.data.bfloat16().float(), layer.bias
    if half is not None:
        layer.bias.data = half.data.bfloat16().float()
    return layer


def assert_near(found, expected):
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.01, rtol=0.01)


@needs_kernel
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inside", "outside"), SIZES)
def test_any_number_of_rows_is_multiplied_as_the_layer_does(inside, outside, bias):
    layer = layer_of(inside, outside, bias=bias)
    mine = Bf16PairLinear.of(layer)
    assert isinstance(mine, Bf16PairLinear)
    for rows in ROWS:
        x = torch.randn(rows, inside).bfloat16()
        expected = layer(x.float()).detach()
        assert_near(mine(x), expected)
        assert_near(mine.silu(x), F.silu(expected))
        factor = torch.randn(rows, outside).bfloat16()
        wanted = expected * factor.float()
        assert_near(mine.times(x, factor), wanted)


@needs_kernel
@pytest.mark.parametrize(("outside", "inside"), [(16, 2), (48, 30), (32, 32), (112, 62), (64, 94)])
def test_weights_of_any_even_width_come_into_pairs_from_either_type(outside, inside):
    weight = torch.randn(outside, inside)
    expected = weight.bfloat16().unflatten(0, (-1, 16)).unflatten(-1, (-1, 2)).transpose(1, 2)
    for x in (weight, weight.bfloat16()):
        assert pairs.bf16_matmul().pair_columns(x).equal(expected)


@needs_kernel
def test_layers_stand_side_by_side_and_are_told_apart():
    layers = [layer_of(48, size, seed=size) for size in (32, 8, 8)]
    x = torch.randn(3, 5, 48).bfloat16()
    parts = Bf16PairLinear.of(*layers).split(x, (32, 8, 8))
    for part, expected in zip(parts, InPlaceLinear.of(*layers).split(x.float(), (32, 8, 8)), strict=True):
        assert_near(part, expected)


@needs_kernel
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_large_numbers_neither_overflow_in_silu_nor_vanish(scale):
    layer = layer_of(64, 32)
    x = (torch.randn(7, 64) * scale).bfloat16()
    found = Bf16PairLinear.of(layer).silu(x).float()
    assert found.isfinite().all()
    torch.testing.assert_close(found, F.silu(layer(x.float())).detach(), atol=0.01 * scale, rtol=0.01)


@needs_kernel
def test_what_is_not_a_number_stays_none_in_its_row_only():
    x = torch.randn(7, 64).bfloat16()
    x[3, 5] = float("nan")
    for found in (Bf16PairLinear.of(layer_of(64, 32))(x), Bf16PairLinear.of(layer_of(64, 32)).silu(x)):
        assert found[3].isnan().all()
        assert found[[0, 1, 2, 4, 5, 6]].isfinite().all()


@needs_kernel
def test_a_row_is_the_same_bit_for_bit_whoever_is_beside_it_and_whoever_computes_it():
    mine, x = Bf16PairLinear.of(layer_of(640, 176)), torch.randn(200, 640).bfloat16()
    whole = mine(x)
    for rows in (1, 6, 64, 199):
        assert mine(x[-rows:]).equal(whole[-rows:])
    for count in (1, 2, 3):
        with threads(count):
            assert mine(x).equal(whole)


@needs_bfloat16
@pytest.mark.parametrize(("inside", "outside"), [(31, 32), (32, 24)])
def test_sizes_that_are_no_whole_pairs_or_panels_are_onednns(inside, outside):
    assert isinstance(Bf16PairLinear.of(layer_of(inside, outside)), OneDnnLinear)


@needs_kernel
def test_a_sampler_computes_no_row_in_vain_and_draws_what_onednn_draws_nearly(monkeypatch):
    """The same tokens at first; rounding parts them later."""
    model, tokenizer = tiny_model("qwen2", hidden=64, layers=2), tiny_tokenizer()
    params = SamplingParams(max_tokens=3, seed=3)
    mine = NativeSampler(model, tokenizer, dtype="bfloat16")
    assert mine.forward.weights
    drawn = ids_of(list(mine.sample(TEXTS, 3, params)))
    monkeypatch.setattr(linear, "bf16_matmul", lambda: None)
    theirs = NativeSampler(model, tokenizer, dtype="bfloat16")
    assert not theirs.forward.weights
    same = [
        a == b
        for one, two in zip(drawn, ids_of(list(theirs.sample(TEXTS, 3, params))), strict=True)
        for a, b in zip(one, two, strict=True)
    ]
    assert sum(same) >= 0.8 * len(same)


@needs_bfloat16
def test_without_the_kernel_onednn_multiplies(fresh, monkeypatch):
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    assert isinstance(Bf16PairLinear.of(layer_of(32, 32)), OneDnnLinear)


@needs_kernel
def test_where_the_processor_multiplies_tiles_onednn_does(fresh, monkeypatch):
    monkeypatch.setattr(pairs, "processor_has", lambda what: True)
    assert isinstance(Bf16PairLinear.of(layer_of(32, 32)), OneDnnLinear)


@needs_kernel
def test_a_kernel_that_computes_something_else_is_found_out(fresh, monkeypatch, caplog):
    real = pairs.Bf16Matmul.multiply

    def without_silu(self, *args, epilogue=Epilogue.NONE):
        return real(self, *args, epilogue=Epilogue.NONE if epilogue == Epilogue.SILU else epilogue)

    monkeypatch.setattr(pairs.Bf16Matmul, "multiply", without_silu)
    with caplog.at_level(logging.WARNING, "covey"):
        assert isinstance(Bf16PairLinear.of(layer_of(32, 32)), OneDnnLinear)
    assert "not with compiled kernels: products differ by" in caplog.text
