"""bitsandbytes' optimizers on a CPU: by slices the same numbers, without working space of a whole parameter."""

import warnings

import pytest
import torch

from covey.learner import sliced_update
from covey.learner.sliced_update import update_in_slices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the package says of itself while it loads
    bnb = pytest.importorskip("bitsandbytes")

KINDS = {
    "adamw, 8 bits": lambda parameters: bnb.optim.AdamW8bit(parameters, lr=1e-2, weight_decay=0.1),
    "lion, 8 bits": lambda parameters: bnb.optim.Lion8bit(parameters, lr=1e-2, weight_decay=0.1),
    "adamw, 32 bits": lambda parameters: bnb.optim.AdamW32bit(parameters, lr=1e-2, weight_decay=0.1),
    "ademamix, 8 bits": lambda parameters: bnb.optim.AdEMAMix8bit(parameters, lr=1e-2),
}


def parameters(dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = [(70, 101), (4096,), (3, 5)]  # the first ends in the middle of a slice and of a block
    return [torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def trained(make, dtype, wrap):
    weights = parameters(dtype)
    optimizer = wrap(make(weights))
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw).to(dtype)
        optimizer.step()
    return weights, optimizer.state_dict()["state"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_state_are_those_of_the_whole_update_bit_for_bit(kind, dtype, monkeypatch):
    monkeypatch.setattr(sliced_update, "SLICE", 1024)
    whole, whole_state = trained(KINDS[kind], dtype, lambda optimizer: optimizer)
    sliced, sliced_state = trained(KINDS[kind], dtype, update_in_slices)
    assert all(torch.equal(one, other) for one, other in zip(whole, sliced, strict=True))
    assert whole_state.keys() == sliced_state.keys()
    for key, one in whole_state.items():
        assert one["step"] == sliced_state[key]["step"] == 3
        assert all(torch.equal(one[name], sliced_state[key][name]) for name in one if torch.is_tensor(one[name]))


def test_the_kernel_never_sees_more_than_a_slice(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.values = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "optimizer_update" in func.__name__:
                self.values.append(args[2].numel())  # the weight
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(sliced_update, "SLICE", 1024)
    seen = {}
    for wrap in (lambda optimizer: optimizer, update_in_slices):
        weight = torch.nn.Parameter(torch.randn(30, 101))
        optimizer = wrap(bnb.optim.AdamW8bit([weight], min_8bit_size=16))
        weight.grad = torch.ones_like(weight)
        with Seen() as kernel:
            optimizer.step()
        seen[wrap is update_in_slices] = kernel.values
    assert seen == {False: [3030], True: [1024, 1024, 982]}


def test_another_optimizer_is_left_as_it_is():
    optimizer = torch.optim.AdamW(parameters(torch.float32))
    assert update_in_slices(optimizer) is optimizer
    assert "update_step" not in vars(optimizer)
