"""Packed rows through layers that choose their keys by an indexer: values and gradients are those of single rows."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from shared_rows import assert_same, checkpointing, gradients, row

from covey.errors import ConfigError
from covey.kernels import choosing_few
from covey.learner.context_parallel import expect_shared_out
from covey.learner.policy import Policy
from covey.models import expert_weights
from covey.process.context import ContextGroup
from covey.process.world import World
from kit import rest_nightly
from rollout.causal_classes import INDEXED, build

_random = torch.Generator().manual_seed(0)
ids = lambda count: torch.randint(3, 300, (count,), generator=_random).tolist()
PROMPTS = {0: ids(9), 1: ids(14), 2: ids(1)}
ROWS = [row(group, PROMPTS[group], ids(count)) for group, count in ((0, 12), (1, 3), (0, 1), (2, 7), (1, 20), (0, 6))]


@pytest.mark.parametrize("kind", rest_nightly(INDEXED, ("deepseek_v32",)))
def test_completions_choose_from_their_prompt_and_themselves(kind):
    policy = Policy(build(kind), pad_id=0)
    assert policy.shares_prompts()
    together, apart = gradients(policy, [ROWS]), gradients(policy, [[one] for one in ROWS])
    policy.release()
    assert_same(together, apart)
    others = [module for module in policy.model.modules() if not expert_weights(module)]  # experts keep theirs
    assert not any("forward" in vars(module) for module in others)


def test_a_warning_says_that_they_choose_keys_of_whole_rows(caplog):
    policy = Policy(build("deepseek_v32"), pad_id=0)
    with caplog.at_level(logging.WARNING, logger="covey.learner.trials"):
        assert policy.shares_prompts()
    (line,) = [line for line in caplog.messages if "once a completion" in line]
    assert line.endswith("in its layers DeepseekV32Indexer alone, which choose keys of whole rows.")


def test_the_choice_changes_gradients():
    """The cases above could fail."""
    policy = Policy(build("deepseek_v32"), pad_id=0)
    values, _ = gradients(policy, [ROWS])
    with choosing_few(policy.model, 1000):
        everything, _ = gradients(policy, [ROWS])
    assert max(float((a - b).abs().max()) for a, b in zip(values, everything, strict=True)) > 1e-2


def test_recomputed_activations_change_no_gradient():
    policy = Policy(build("glm_moe_dsa"), pad_id=0)
    plain = gradients(policy, [ROWS])
    again = Policy(checkpointing(build("glm_moe_dsa")), pad_id=0)
    assert_same(gradients(again, [ROWS]), plain)


def test_a_forward_between_packed_passes_chooses_as_well():
    """The model's attention is switched until the backward pass; what is read meanwhile is read as before."""
    policy, text = Policy(build("deepseek_v32"), pad_id=0), torch.tensor([ids(20)])
    with torch.no_grad():
        expected = policy.model(input_ids=text).logits
    policy.measure(ROWS)
    with torch.no_grad():
        torch.testing.assert_close(policy.model(input_ids=text).logits, expected, atol=1e-5, rtol=1e-5)


def test_tokens_of_a_row_are_not_shared_out_over_processes():
    policy = replace(Policy(build("deepseek_v32"), pad_id=0), context=ContextGroup(World(context=2)))
    with pytest.raises(ConfigError, match="its layers choose the keys of a token among those of a whole row"):
        expect_shared_out(policy.model, 2, policy.heads)
