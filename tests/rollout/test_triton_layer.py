"""Triton's elementwise kernels of a decoder layer against PyTorch, in Triton's interpreter on a CPU."""

import importlib

import pytest
import torch
from torch.nn import functional as F
from triton_cases import IN_THE_INTERPRETER

triton = pytest.importorskip("triton", reason="triton is not installed (286 MB, so not among the development tools)")

pytestmark = [pytest.mark.nightly, *IN_THE_INTERPRETER]


@pytest.fixture
def kernels():
    from covey.kernels import triton_layer

    return triton_layer


def cut(x):
    """`x` in bfloat16 as the interpreter makes it: cut, where a GPU rounds."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


@pytest.mark.parametrize("rows, width", [(1, 64), (3, 896), (2, 100)])
@pytest.mark.parametrize("has_update", [True, False])
def test_a_float32_residual_is_added_to_and_normed(kernels, rows, width, has_update):
    x, weight = torch.randn(rows, width), torch.randn(width)
    both = torch.randn(rows, 2 * width)
    update = both[:, width:] if has_update else None  # strided, as half of a product
    expected_x = x + update if has_update else x.clone()
    h = kernels.add_norm(x, update, weight, 1e-6, torch.float32)
    assert torch.equal(x, expected_x)
    torch.testing.assert_close(h, F.rms_norm(expected_x, (width,), weight, 1e-6))


def test_a_16_bit_residual_is_rounded_where_the_modules_round(kernels):
    x, update, weight = torch.randn(2, 96).bfloat16(), torch.randn(2, 96).bfloat16(), torch.randn(96)
    total = cut(x.float() + update.float())
    normed = cut(total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    h = kernels.add_norm(x, update, weight, 1e-6, torch.bfloat16)
    assert torch.equal(x.float(), total)
    torch.testing.assert_close(h.float(), cut(normed * weight), atol=0, rtol=2**-7)  # one unit in the last place


@pytest.mark.parametrize("rows, width", [(1, 16), (3, 1100)])
def test_the_gate_is_silu_times_up(kernels, rows, width):
    gate, up = torch.randn(rows, 2 * width).chunk(2, -1)
    torch.testing.assert_close(kernels.gated(gate, up), F.silu(gate) * up)
    torch.testing.assert_close(kernels.gated(gate.contiguous(), up.contiguous()), F.silu(gate) * up)


@pytest.mark.parametrize("offset, has_weight", [(0.0, True), (1.0, True), (0.0, False)])
def test_norms_of_modules_have_an_offset_or_no_weight(kernels, offset, has_weight):
    x, weight = torch.randn(2, 3, 5, 24).transpose(1, 2), torch.randn(24) if has_weight else None
    expected = F.rms_norm(x, (24,), None, 1e-6) * (1 if weight is None else weight + offset)
    torch.testing.assert_close(kernels.norm(x, weight, 1e-6, offset, torch.float32), expected)


@pytest.mark.parametrize(
    "family, table", [("llama", 16), ("glm4", 16), ("glm4", 8), ("cohere", 16), ("gpt_oss", 8), ("phi3", 8)]
)
def test_rotations_are_those_of_the_models(kernels, family, table):
    from covey.kernels.rotations import recognised

    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = recognised(home.apply_rotary_pos_emb)
    query, key = (torch.randn(2, 5, heads, 16).transpose(1, 2) for heads in (4, 1))
    angles = torch.randn(2, 5, table if family == "gpt_oss" else table // 2)
    if family == "cohere":
        angles = angles.repeat_interleave(2, -1)
    elif family != "gpt_oss":
        angles = torch.cat([angles, angles], -1)
    expected = home.apply_rotary_pos_emb(query, key, angles.cos(), angles.sin())
    for x, y in zip((query, key), expected, strict=True):
        rotated = kernels.rotate(x, angles.cos(), angles.sin(), kind.pairs, kind.by_pair, torch.float32)
        torch.testing.assert_close(rotated, y)
