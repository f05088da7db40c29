"""Log-probabilities and gradients of prompts with media: those of one row at a time, whatever is shared, packed or mixed."""

import pytest
import torch
from media_prompts import ALL, prompts, tiny_of

from covey.learner import Policy
from covey.learner.packing import Row
from covey.types import Completion

KIND = pytest.mark.parametrize("kind", ALL)


def rows_for(found, lengths=(3, 5, 1)):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for group, prompt in enumerate(found):
        for length in lengths:
            ids = torch.randint(3, 300, (length,), generator=generator)
            done = Completion(token_ids=ids, text="", finish="stop")
            rows.append(Row(prompt, done, group, torch.ones(()), torch.ones(length, dtype=torch.bool)))
    return rows


def by_the_model(model, processor, row):
    """[T] log-probabilities by the model's own forward, one row, media as the processor made them."""
    ids = torch.cat([torch.tensor(row.prompt.token_ids), row.completion.token_ids])[None]
    given = {}
    if row.prompt.media is not None:
        given = dict(row.prompt.media.tensors)
        for name, kinds in row.prompt.media.token_types.items():
            given[name] = torch.nn.functional.pad(kinds, (0, row.completion.num_tokens))[None]
    mask = torch.ones_like(ids)  # Qwen2.5-Omni numbers positions of media only with it
    logits = model(input_ids=ids, attention_mask=mask, **given, use_cache=False).logits[0].float()
    for name in (
        "image_token_id",
        "image_token_index",
        "video_token_id",
        "audio_token_id",
        "audio_token_index",
        "audio_start_token_id",
    ):
        if isinstance(getattr(model.config, name, None), int):
            logits[:, getattr(model.config, name)] = -torch.inf
    start = len(row.prompt.token_ids)
    logp = logits[start - 1 : -1].log_softmax(-1)
    if getattr(getattr(model, "model", None), "rope_deltas", None) is not None:
        model.model.rope_deltas = None
    return logp.gather(-1, row.completion.token_ids[:, None]).squeeze(-1)


@KIND
def test_gradients_of_a_mixed_batch_are_those_of_one_row_at_a_time(kind):
    model, processor = tiny_of(kind)
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
