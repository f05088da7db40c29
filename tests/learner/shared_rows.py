"""Rows with a shared prompt, policies over them, and comparisons of their gradients."""

import torch

from covey.learner.packing import Row
from covey.learner.policy import Policy
from covey.types import Completion, Prompt


def row(group, prompt, completion):
    ids = torch.tensor(completion)
    return Row(
        prompt=Prompt(uid=f"0:{group}", token_ids=tuple(prompt)),
        completion=Completion(token_ids=ids, text="", finish="stop"),
        group=group,
        advantage=torch.zeros(()),
        counts=torch.ones(len(ids), dtype=torch.bool),
    )


A, B = [5, 6, 7, 8], [12, 13]


ROWS = [row(0, A, [9, 10, 11]), row(1, B, [14]), row(0, A, [15]), row(1, B, [16, 17, 18, 19]), row(0, A, [20, 21])]


def gradients(policy, batches):
    policy.model.zero_grad()
    values = []
    for batch in batches:
        measured = policy.measure(batch, entropy=True)
        weight = 0.7 * torch.arange(measured.logp.shape[1], device=measured.logp.device) - 1
        (measured.logp * weight + 0.3 * measured.entropy).sum().backward()
        values += [measured.logp[i, : one.completion.num_tokens].detach() for i, one in enumerate(batch)]
    return values, {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def assert_same(got, want):
    """Values, and every parameter's gradient, to 1e-5 of its norm (and 1e-6 of the whole gradient's: some are 0 but for rounding)."""
    for one, other in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert got[1].keys() == want[1].keys()
    whole = torch.stack([gradient.norm() for gradient in want[1].values()]).norm()
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6 * whole, name


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def checkpointing(model):
    """The model in training mode, with activations that are computed again."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return without_dropout(model).train()


def policy_by(kernel, model):
    """A policy whose shared prompts go through this kernel."""
    name = {"one": "own", "SDPA": "sdpa", "FlexAttention,": "flex"}[kernel.split()[0]]
    policy = Policy(model, pad_id=0, shared_attention="auto" if name == "own" else name)
    assert policy.shares_prompts(), "this architecture shares prompts"
    assert policy.kernel == name
    return policy


def biased_by_distance():
    """ALiBi: the scores of attention depend on places in the row, where completions stand one behind the other."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)).eval()
