"""Packed rows through layers with a state: a prompt is computed once for its group, values and gradients are those of single rows."""

from __future__ import annotations

import logging

import pytest
import torch

from covey.learner.packing import Row
from covey.learner.policy import Policy
from covey.learner.preparation import checkpoint_activations
from covey.types import Completion, Prompt
from kit import rest_nightly
from rollout.causal_classes import build

FROM_STATES = (
    "qwen3_5_text", "granitemoehybrid", "lfm2", "falcon_h1", "mamba2", "nemotron_h", "bamba", "olmo_hybrid", "qwen3_next",
    "qwen3_5_moe_text", "lfm2_moe", "lfm3", "bailing_hybrid", "kimi_linear",
)  # fmt: skip
FROM_ROWS = ("recurrent_gemma", "mamba", "jamba", "minimax", "falcon_mamba")
"""Transformers' code of these layers begins with no state."""
LENGTHS = ((9, (5, 1, 7)), (4, (6, 3)), (9, (2, 1)), (1, (4, 4)), (6, (1,)))
"""Tokens of each prompt and of its completions."""


def rows():
    random = torch.Generator().manual_seed(0)
    found = []
    for group, (length, counts) in enumerate(LENGTHS):
        prompt = Prompt(uid=str(group), token_ids=tuple(torch.randint(3, 300, (length,), generator=random).tolist()))
        for count in counts:
            ids = torch.randint(3, 300, (count,), generator=random)
            written = Completion(token_ids=ids, text="", finish="stop")
            advantage = torch.randn((), generator=random)
            found.append(Row(prompt, written, group, advantage, torch.ones(count, dtype=torch.bool)))
    return found


def scored(policy, batches):
    """Log-probabilities of all completion tokens, and the gradients of a weighted sum."""
    policy.model.zero_grad()
    logps = []
    for batch in batches:
        measured = policy.measure(batch)
        (measured.logp * torch.stack([row.advantage for row in batch])[:, None]).sum().backward()
        logps += [measured.logp[i, : row.completion.num_tokens].detach() for i, row in enumerate(batch)]
    policy.release()
    return torch.cat(logps), {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def expect_same(policy):
    assert policy.shares_prompts()
    together, apart = scored(policy, [rows()]), scored(policy, [[row] for row in rows()])
    torch.testing.assert_close(together[0], apart[0], atol=1e-5, rtol=0)
    assert together[1].keys() == apart[1].keys()
    for name, gradient in apart[1].items():
        assert float((together[1][name] - gradient).norm() / gradient.norm().clamp(min=1)) <= 1e-5, name


@pytest.mark.parametrize("kind", rest_nightly(FROM_STATES, ("qwen3_5_text",)))
def test_completions_begin_with_their_prompts_state(kind):
    policy = Policy(build(kind).train(), pad_id=0)
    expect_same(policy)
    assert {layer.way for layer in policy.state_layers} == {"states"}


@pytest.mark.parametrize("kind", rest_nightly(FROM_ROWS, 1))
def test_a_layer_that_begins_with_no_state_reads_whole_rows_and_says_so_once(kind, caplog):
    policy = Policy(build(kind).train(), pad_id=0)
    with caplog.at_level(logging.WARNING, logger="covey.learner.trials"):
        expect_same(policy)
    assert {layer.way for layer in policy.state_layers} == {"rows"}
    assert sum("alone, which begin with no state" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("kind", rest_nightly(["qwen3_5_text", "recurrent_gemma"], ["recurrent_gemma"]))
def test_recomputed_activations_change_no_gradient(kind):
    policy = Policy(build(kind).train(), pad_id=0)
    plain = scored(policy, [rows()])
    checkpoint_activations(policy.model)
    again = scored(policy, [rows()])
    torch.testing.assert_close(again, plain, atol=1e-6, rtol=1e-5)


def test_adapters_on_layers_with_a_state_get_their_gradients():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj"], init_lora_weights=False)
    expect_same(Policy(peft.get_peft_model(build("qwen3_5_text"), config).train(), pad_id=0))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba"])
def test_a_prompt_passes_the_rest_of_the_model_once(kind):
    policy, passed = Policy(build(kind).eval(), pad_id=0), []
    assert policy.shares_prompts()
    hook = policy.model.get_input_embeddings().register_forward_hook(
        lambda m, given, out: passed.append(given[0].numel())
    )
    with torch.no_grad():
        policy.measure(rows())
    hook.remove()
    needed = sum(length + sum(count - 1 for count in counts) for length, counts in LENGTHS)
    assert needed <= sum(passed) < needed + 64  # few sizes


def test_the_layers_get_their_own_forward_back():
    policy = Policy(build("qwen3_5_text").train(), pad_id=0)
    assert policy.shares_prompts()
    measured = policy.measure(rows())
    assert any("forward" in vars(module) for module in policy.model.modules())
    measured.logp.sum().backward()
    policy.release()
    assert not any("forward" in vars(module) for module in policy.model.modules())


def test_a_state_that_is_handed_over_and_ignored_is_seen(monkeypatch):
    """A layer that takes an initial state and computes without it, as some kernels would."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as source

    chunked = source.torch_chunk_gated_delta_rule
    monkeypatch.setattr(
        source,
        "torch_chunk_gated_delta_rule",
        lambda *args, initial_state=None, **options: chunked(*args, initial_state=None, **options),
    )
    policy = Policy(build("qwen3_5_text").train(), pad_id=0)
    expect_same(policy)
    assert {layer.way for layer in policy.state_layers} == {"rows"}


@pytest.mark.nightly
@pytest.mark.parametrize("kind, is_cast", rest_nightly([("mamba2", True), ("qwen3_5_text", False)], 1))
def test_in_bfloat16_they_share_as_well(kind, is_cast):
    """Mamba2 hands a float32 stream to a head in bfloat16."""
    model = build(kind).train()
    policy = Policy(model.bfloat16() if is_cast else model, pad_id=0, compute_dtype=None if is_cast else torch.bfloat16)
    assert policy.shares_prompts()
    together, apart = scored(policy, [rows()]), scored(policy, [[row] for row in rows()])
    assert float((together[0] - apart[0]).abs().mean()) < 0.01
    gap = sum(float((together[1][name] - x).float().norm() ** 2) for name, x in apart[1].items())
    assert gap < 4e-4 * sum(float(x.float().norm() ** 2) for x in apart[1].values())
