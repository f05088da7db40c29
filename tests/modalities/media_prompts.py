"""Tiny models of every kind, prompts with images or sounds for them, and what the models themselves make of these."""

import torch

from covey.data.prompts import to_prompt
from covey.learner import Policy
from covey.learner.packing import Row
from covey.models.modalities import banned_ids
from covey.rollout import SamplingParams
from covey.types import Completion
from modalities.models import SEEING, picture, tiny_vlm
from modalities.sound_models import KINDS as HEARING
from modalities.sound_models import tiny_hearing_model, tone

ALL = (*SEEING, *HEARING)
EMBEDDED = tuple(kind for kind in ALL if kind not in ("gemma3", "gemma3n"))
"""Models whose language model needs embeddings and positions alone."""


def tiny_of(kind):
    """(model in eval mode, processor) with random weights."""
    return tiny_vlm(kind) if kind in SEEING else tiny_hearing_model(kind)


def ask(text):
    return [{"role": "user", "content": text}]


def rows_of(kind):
    """One item, two items of different sizes, none; where both are read, an image with a sound, and an image, too."""
    if kind in SEEING:
        items = {"image": picture(2)}, {"images": [picture(3, (64, 32), 1), picture(1)]}
    else:
        items = {"audio": tone(440)}, {"audios": [tone(300, 1.2), tone(900, 0.3)]}
    rows = [{"prompt": ask("How many?"), **items[0]}, {"prompt": ask("More in the first?"), **items[1]}]
    rows.append({"prompt": ask("What is 2 + 3?")})
    if kind in ("qwen2_5_omni", "gemma3n"):
        rows.append({"prompt": ask("Which fits?"), "image": picture(3), "audio": tone(700, 0.8)})
        rows.append({"prompt": ask("How many?"), "image": picture(2)})
    return rows


def prompts(processor, kind):
    return [
        to_prompt(row, f"0:{i}", f"row {i}", processor.tokenizer, {}, processor) for i, row in enumerate(rows_of(kind))
    ]


GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def generated(model, processor, prompt, tokens=8):
    given = {} if prompt.media is None else dict(prompt.media.tensors)
    if prompt.media is not None:
        given |= {name: kinds[None] for name, kinds in prompt.media.token_types.items()}
    ids = torch.tensor([prompt.token_ids])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **given,
        max_new_tokens=tokens,
        do_sample=False,
        suppress_tokens=list(banned_ids(model)),
    )
    return out[0, ids.shape[1] :].tolist()


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


def expect_gradients_of_rows_alone(model, processor, rows, pad_id):
    """The learner's log-probabilities and gradients of the rows together are those of the model's own forward, one row at a time."""
    weights = [
        torch.randn(row.completion.num_tokens, generator=torch.Generator().manual_seed(i)) for i, row in enumerate(rows)
    ]
    model.zero_grad()
    for row, weight in zip(rows, weights, strict=True):
        (by_the_model(model, processor, row) * weight).sum().backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    policy = Policy(model, pad_id=pad_id)
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


def expect_drawn_is_measured(model, found, sampler, pad_id):
    """Log-probabilities of what the sampler draws behind these prompts are the learner's."""
    groups = list(sampler.sample(found, 3, SamplingParams(max_tokens=6, seed=3)))
    rows = [
        Row(group.prompt, done, g, torch.ones(()), done.written)
        for g, group in enumerate(groups)
        for done in group.completions
    ]
    with torch.no_grad():
        measured = Policy(model, pad_id=pad_id).measure(rows)
    for i, row in enumerate(rows):
        drawn = row.completion.logprobs
        torch.testing.assert_close(measured.logp[i, : len(drawn)], drawn, atol=1e-4, rtol=1e-4)
