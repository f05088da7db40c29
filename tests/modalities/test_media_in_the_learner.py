"""Log-probabilities and gradients of prompts with media: those of one row at a time, whatever is shared, packed or mixed."""

from contextlib import nullcontext

import pytest
import torch
from media_prompts import ALL, expect_gradients_of_rows_alone, prompts, rows_for, tiny_of

from covey.errors import ConfigError
from covey.learner import Policy, ValueHead, ValueModel
from kit import Doubled, rest_nightly

KIND = pytest.mark.parametrize("kind", rest_nightly(ALL, ("qwen2_5_vl", "qwen2_audio")))


ROUNDS = "qwen3_5"
"""The kind whose recurrence leaves 2e-4 of rounding in float32, and 1e-12 in float64."""


@pytest.fixture
def in_double(kind):
    with Doubled() if kind == ROUNDS else nullcontext():
        yield


@KIND
@pytest.mark.usefixtures("in_double")
def test_gradients_of_a_mixed_batch_are_those_of_one_row_at_a_time(kind):
    model, processor = tiny_of(kind)
    model = model.double() if kind == ROUNDS else model
    rows = rows_for(prompts(processor, kind))
    expect_gradients_of_rows_alone(model, processor, rows, processor.tokenizer.pad_token_id)


def test_a_separate_critic_which_does_not_see_is_refused_where_a_prompt_has_media():
    model, processor = tiny_of("llava")
    rows = rows_for(prompts(processor, "llava"))
    policy = Policy(model, pad_id=0)
    critic = ValueModel.of(policy)
    torch.nn.init.ones_(critic.linear.weight)
    seen, blind = ([row for row in rows if (row.prompt.media is None) is is_text] for is_text in (False, True))
    with pytest.raises(ConfigError, match="the language model alone, which does not see"), torch.no_grad():
        critic.values(policy.measure(seen), seen)
    with torch.no_grad():
        measured = policy.measure(blind)
        head = ValueHead(model.config.get_text_config().hidden_size)
        torch.nn.init.ones_(head.linear.weight)
        torch.testing.assert_close(critic.values(measured, blind), head.values(measured, blind), rtol=1e-4, atol=1e-4)
