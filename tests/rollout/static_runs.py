"""Steps on static buffers as a GPU replays them, and a recorder with the rules of a CUDA graph."""

import pytest
import torch
from plain_sampling import collect, ids_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.agreement import plain_logprobs
from kit import tiny_model

PROMPTS = [list(range(5, 5 + length)) for length in (3, 1, 40, 7, 70, 2, 33, 12, 5)]
ASKS_THE_DEVICE = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")
COMES_FROM_THE_HOST = ("scalar_tensor", "lift_fresh", "lift_fresh_copy")


class Recording(TorchDispatchMode):
    """Records the operations of a step and puts back what they wrote; `replay` runs them on the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def of(self, step):
        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # transformers' own checks ask
            self.result = step()
        for storage, content in self.before.values():
            storage.copy_(content)
        return self.replay

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        masks = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in ASKS_THE_DEVICE + COMES_FROM_THE_HOST or masks:
            raise RuntimeError(f"operation not permitted while capturing: {name}")
        for argument, given in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = given.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.calls:
            known = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
            new = function(*args, **kwargs)
            for old, fresh in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in known:
                    old.copy_(fresh)
        return self.result


def record(step):
    return Recording().of(step)


def writer(arch="qwen2"):
    """A model that ends its completions after 1 to 100 tokens, and whose every token hangs on what it attends to."""
    model = tiny_model(arch, layers=2, seed=3)
    head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    head.weight.data = model.lm_head.weight.detach() * 8
    head.bias.data.zero_()
    head.bias.data[2] = 2.5
    model.lm_head = head
    return model


def sampler_of(model, tokenizer, steps=None, **options):
    """A sampler whose scheduler is the GPU's."""
    sampler = NativeSampler(model, tokenizer, dtype="float32", **options)
    sampler.is_static = True
    if steps is not None:
        sampler.static.new_steps = lambda: steps
    return sampler


def keeping_sampler(model, tokenizer, recorder=lambda step: record(step), **options):
    """A sampler as on a GPU, which keeps what it has captured."""
    sampler = sampler_of(model, tokenizer, **options)
    sampler.static.captures, sampler.static.new_capture = True, lambda: recorder
    return sampler


def expect_states_of_replayed_steps(sampler, made, eager, bound):
    """Completions of two sets of weights, bit for bit those of `eager` steps, and within `bound` of a plain forward.

    `made` lists the `Captured` of the sampler's calls.
    """
    params, model = SamplingParams(max_tokens=12, seed=7), sampler.model
    for version in range(2):
        with torch.no_grad():
            for weight in model.parameters() if version else ():
                weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)
        for each in (sampler, eager):
            each.load(model, version)
        groups, expected = (collect(each, PROMPTS, 2, params) for each in (sampler, eager))
        assert ids_of(groups) == ids_of(expected)
        assert torch.equal(logprobs_of(groups), logprobs_of(expected))
        plain = torch.cat(plain_logprobs(model, groups))
        assert float((logprobs_of(groups).cpu() - plain).abs().max()) < bound
    (steps,) = made
    assert steps.reason is None
    assert steps.num_replayed > steps.num_captured > 1


def logprobs_of(groups):
    return torch.cat([c.logprobs for group in groups for c in group.completions])


def finishes_of(groups):
    return [c.finish for group in groups for c in group.completions]


WAYS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.9},
    "rich": {"repetition_penalty": 1.2, "top_k": 60, "stop": ("e",), "min_p": 0.001},
}
