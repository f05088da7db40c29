"""Offloaded activations come back with the sizes and strides that they had, and change no gradient."""

from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from covey.learner.out_of_memory import offloaded


class Saves(torch.autograd.Function):
    """Multiplies by 2, and keeps the strides of a saved tensor at the backward pass."""

    seen: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x, other):
        ctx.save_for_backward(other)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (other,) = ctx.saved_tensors
        Saves.seen.append((other.size(), other.stride(), other.clone()))
        return 2 * gradient, None


BASE = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
LAYOUTS = {
    "heads before tokens": BASE.transpose(1, 2),
    "a part of a merged product": BASE[..., 1:3],
    "expanded": BASE[:, :1].expand(2, 7, 4, 5),
    "expanded and transposed": BASE[:, :1].expand(2, 7, 4, 5).transpose(0, 3),
    "every second": BASE[..., ::2],
    "one number": torch.tensor(3.0),
    "empty": BASE[:0],
    "integers": torch.arange(12).view(3, 4).t(),
    "windows that overlap": torch.arange(10.0).unfold(0, 4, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_saved_tensor_comes_back_with_its_strides(name):
    Saves.seen.clear()
    x, kept = torch.ones(3, requires_grad=True), LAYOUTS[name]
    with offloaded(pins=False):
        loss = Saves.apply(x, kept).sum()
    loss.backward()
    ((size, stride, values),) = Saves.seen
    assert (size, stride) == (kept.size(), kept.stride())
    assert torch.equal(values, kept)


def test_gradients_are_the_same_and_weights_are_not_copied():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))
    x = torch.randn(5, 8)

    def gradients(context):
        model.zero_grad()
        with context:
            out = model(x)
        out.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    assert torch.equal(gradients(nullcontext()), gradients(offloaded(pins=False)))
    hooks = offloaded(pins=False)
    weight = model[0].weight
    assert hooks.pack_hook(weight) is weight
    transposed = weight.t()
    assert hooks.pack_hook(transposed) is transposed
