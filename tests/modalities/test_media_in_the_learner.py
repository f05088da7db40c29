"""Log-probabilities and gradients of prompts with media: those of one row at a time, whatever is shared, packed or mixed."""

from contextlib import nullcontext

import pytest
import torch
from media_prompts import ALL, by_the_model, prompts, rows_for, tiny_of

from covey.learner import Policy
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
    weights = [
        torch.randn(row.completion.num_tokens, generator=torch.Generator().manual_seed(i)) for i, row in enumerate(rows)
    ]
    model.zero_grad()
    for row, weight in zip(rows, weights, strict=True):
        (by_the_model(model, processor, row) * weight).sum().backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    policy = Policy(model, pad_id=processor.tokenizer.pad_token_id)
    model.zero_grad()
    measured = policy.measure(rows)
    for i, row in enumerate(rows):
        expected = by_the_model(model, processor, row)
        torch.testing.assert_close(measured.logp[i, : len(expected)], expected, atol=1e-5, rtol=1e-5)
    sum((measured.logp[i, : len(w)] * w).sum() for i, w in enumerate(weights)).backward()
    together = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert together.keys() == alone.keys()
    assert any("vis" in name or "audio" in name for name in alone), "the towers have gradients"
    for name, gradient in alone.items():
        scale = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(together[name] / scale, gradient / scale, atol=1e-5, rtol=1e-4, msg=name)
