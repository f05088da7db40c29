"""Packed rows through attention layers that choose their keys themselves: values and gradients are those of single rows."""

from __future__ import annotations

import logging

import pytest
import torch
from shared_rows import assert_same, checkpointing, gradients, row

from covey.errors import ConfigError
from covey.kernels import choosing_few
from covey.learner.context_parallel import expect_shared_out
from covey.learner.policy import Policy
from covey.models import expert_weights
from kit import rest_nightly
from rollout.causal_classes import build

_random = torch.Generator().manual_seed(0)
_ids = iter(torch.randperm(300, generator=_random).add_(10).tolist())
ids = lambda count: [next(_ids) for _ in range(count)]  # none twice, since keys of one score may be chosen either way
PROMPTS = {0: ids(9), 1: ids(14), 2: ids(1)}
ROWS = [row(group, PROMPTS[group], ids(count)) for group, count in ((0, 12), (1, 3), (0, 1), (2, 7), (1, 20), (0, 6))]


def built(kind):
    model = build(kind)
    for module in model.modules():
        if hasattr(module, "keep_window_size"):
            torch.nn.init.normal_(module.A, generator=torch.Generator().manual_seed(0))
            module.keep_window_size = 6
    return model


@pytest.mark.parametrize(
    "kind",
    rest_nightly(
        ("minimax_m3_vl_text", "doge", "falcon", "gpt_neo", "qwen4_exp_text", "git"),
        ("minimax_m3_vl_text", "doge"),
    ),
)
def test_attention_reads_each_completion_with_its_prompt(kind):
    policy = Policy(built(kind), pad_id=0)
    assert policy.shares_prompts()
    together, apart = gradients(policy, [ROWS]), gradients(policy, [[one] for one in ROWS])
    policy.release()
    assert_same(together, apart)
    others = [module for module in policy.model.modules() if not expert_weights(module)]  # experts keep theirs
    assert not any("forward" in vars(module) for module in others)


def test_two_policies_of_one_model_take_turns():
    """A reference without the adapter is the same model: its layers are replaced once."""
    model = build("minimax_m3_vl_text")
    first, second = Policy(model, pad_id=0), Policy(model, pad_id=0)
    assert first.shares_prompts()
    assert second.shares_prompts()
    with torch.no_grad():
        apart = [first.measure(ROWS[:1]).logp, second.measure(ROWS[:1]).logp]
        assert torch.equal(*apart)
        both = [policy.measure(ROWS).logp for policy in (first, second, first)]
    assert torch.equal(both[0], both[1])
    assert torch.equal(both[0], both[2])


def test_the_choice_changes_gradients():
    """The cases above could fail."""
    policy = Policy(build("minimax_m3_vl_text"), pad_id=0)
    values, _ = gradients(policy, [ROWS])
    with choosing_few(policy.model, 1000):
        everything, _ = gradients(policy, [ROWS])
    assert max(float((a - b).abs().max()) for a, b in zip(values, everything, strict=True)) > 1e-2


@pytest.mark.nightly
def test_recomputed_activations_and_eager_attention_change_no_gradient():
    plain = gradients(Policy(build("minimax_m3_vl_text"), pad_id=0), [ROWS])
    assert_same(gradients(Policy(checkpointing(build("minimax_m3_vl_text")), pad_id=0), [ROWS]), plain)
    eager = build("minimax_m3_vl_text")
    eager.set_attn_implementation("eager")
    policy = Policy(eager, pad_id=0)
    assert policy.shares_prompts()
    assert_same(gradients(policy, [ROWS]), plain)


def test_a_warning_says_that_they_read_whole_rows(caplog):
    policy = Policy(build("minimax_m3_vl_text"), pad_id=0)
    with caplog.at_level(logging.WARNING, logger="covey.learner.trials"):
        assert policy.shares_prompts()
    (line,) = [line for line in caplog.messages if "once a completion" in line]
    assert line.endswith("in its layers MiniMaxM3VLAttention alone, whose own attention reads whole rows.")
    with pytest.raises(ConfigError, match="its layers choose the keys of a token among those of a whole row"):
        expect_shared_out(policy.model, 2, policy.heads)


def test_windows_that_no_short_trial_shows_are_not_shared():
    model = build("doge")
    model.config.sliding_window = 8
    assert not Policy(model, pad_id=0).shares_prompts()
