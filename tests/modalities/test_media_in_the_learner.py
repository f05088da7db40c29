"""Log-probabilities and gradients of prompts with media: those of one row at a time, whatever is shared, packed or mixed."""

from contextlib import nullcontext

import pytest
from media_prompts import ALL, expect_gradients_of_rows_alone, prompts, rows_for, tiny_of

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
