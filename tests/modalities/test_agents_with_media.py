"""Agents that show images and sounds to the run's own endpoint: what is sampled is a plain forward's, and what is learnt is that."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import openai
import pytest
import torch
from acting_models import acting_model, item, prompt_of, row, rows_of
from models import picture

from covey.environments import Agent
from covey.errors import DataError
from covey.learner import Policy
from covey.models.modalities import banned_ids, forget_positions, whole_inputs
from covey.rollout import SamplingParams, choose_sampler
from covey.rollout.agreement import plain_logprobs
from covey.serving import AgentSampler
from covey.serving.content import openai_messages
from covey.serving.sessions import Sessions
from kit import rest_nightly
from modalities.agents import ending, png

pytestmark = pytest.mark.filterwarnings("ignore:.*plain transformers:UserWarning")
KINDS = ("qwen2_5_vl", "llava", "gemma3", "idefics3", "qwen2_5_omni", "qwen2_audio")


def shows(more, turns=2):
    """A loop that sends the row's messages, and in each further turn the parts that `more` gives for it."""

    def main(row, client):
        messages = list(row["prompt"])
        for turn in range(turns):
            said = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            text = said.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": more(row, turn)}]
        return 1.0

    return main


def again(row, turn):
    """Another item of the row's kind, and words."""
    return [row["prompt"][0]["content"][0], {"type": "text", "text": f"and now {turn}?"}]


def drawn(model, processor, main, rows, n=2, backend="auto", **made):
    sampler = choose_sampler(model, processor.tokenizer, backend=backend, dtype="float32")
    agents = AgentSampler(sampler, Agent(main), max_tokens=400, processor=processor, **made)
    found = [prompt_of(processor, one, f"0:{i}", ()) for i, one in enumerate(rows)]
    try:
        groups = list(agents.sample(found, n, SamplingParams(max_tokens=400, seed=3)))
    finally:
        agents.close()
    return sorted(groups, key=lambda group: group.prompt.uid)


def learnt(model, processor, groups):
    """Log-probabilities that the learner computes, all rows together; and its gradient."""
    completions = [one for group in groups for one in group.completions]
    rows = rows_of(groups)
    model.zero_grad()
    measured = Policy(model, pad_id=processor.tokenizer.pad_token_id, packs_always=True).measure(rows).logp
    written = torch.nn.utils.rnn.pad_sequence([one.written for one in completions], batch_first=True)
    (measured * written).sum().backward()
    return measured.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def compare(model, processor, groups):
    """The sampler's log-probabilities and the learner's with a plain forward over ids and pixels of each row by itself."""
    measured, gradient = learnt(model, processor, groups)
    completions = [one for group in groups for one in group.completions]
    for i, (one, plain) in enumerate(zip(completions, plain_logprobs(model, groups), strict=True)):
        assert one.written.any()
        torch.testing.assert_close(one.logprobs[one.written], plain[one.written], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(measured[i, : one.num_tokens][one.written], plain[one.written], atol=1e-5, rtol=1e-5)
    model.zero_grad()
    barred = torch.tensor(banned_ids(model))
    for group in groups:
        for one in group.completions:
            whole = one.behind(group.prompt)
            logits = model(**whole_inputs(model, whole)).logits[0, len(group.prompt.token_ids) - 1 : -1]
            forget_positions(model)
            logp = torch.log_softmax(logits.index_fill(-1, barred, -1e4), -1)
            logp.gather(-1, one.token_ids[:, None])[one.written].sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().clamp(min=1.0)
            torch.testing.assert_close(gradient[name] / scale, parameter.grad / scale, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "backend"),
    rest_nightly(product(KINDS, ("auto", "transformers")), {("qwen2_5_vl", "auto")}),
)
def test_images_in_later_turns_are_sampled_and_learnt_as_a_plain_forward_sees_them(kind, backend):
    model, processor = ending(kind)
    groups = drawn(model, processor, shows(again), [row(kind, i) for i in range(2)], backend=backend)
    for group in groups:
        assert group.prompt.media.count == 1  # the row's own, once for the group
        assert {one.media.count for one in group.completions} == {2}
        assert not any(one.episode.branches for one in group.completions)  # one conversation, its tokens as drawn
    compare(model, processor, groups)


def test_the_pixels_that_are_learnt_are_those_of_the_images_in_their_order():
    """Against inputs that are put together here, from each image by the image processor and from the ids."""
    model, processor = ending("qwen2_5_vl")
    other = picture(3, seed=4)
    groups = drawn(
        model, processor, shows(lambda row, turn: [png(other), {"type": "text", "text": "?"}]), [row("qwen2_5_vl")], n=1
    )
    ((one,), prompt) = groups[0].completions, groups[0].prompt
    made = [
        processor.image_processor(images=[image], return_tensors="pt") for image in (item("qwen2_5_vl")["image"], other)
    ]
    ids = torch.tensor([[*prompt.token_ids, *one.token_ids.tolist()]])
    inputs = {name: torch.cat([each[name] for each in made]) for name in ("pixel_values", "image_grid_thw")}
    kinds = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **inputs).logits[0]
    forget_positions(model)
    logits = logits[len(prompt.token_ids) - 1 : -1].index_fill(-1, torch.tensor(banned_ids(model)), -1e4)
    plain = torch.log_softmax(logits, -1).gather(-1, one.token_ids[:, None])[:, 0]
    torch.testing.assert_close(one.logprobs[one.written], plain[one.written], atol=1e-5, rtol=1e-5)
    assert one.written.sum() < len(one.token_ids)


@pytest.mark.slow
def test_rows_media_alone_are_computed_once_for_the_group():
    model, processor = ending("qwen2_5_vl")
    groups = drawn(
        model, processor, shows(lambda row, turn: f"go on {turn}", 3), [row("qwen2_5_vl", i) for i in range(2)]
    )
    for group in groups:
        encoded = prompt_of(processor, row("qwen2_5_vl", int(group.prompt.uid[-1])), "x", ())
        assert group.prompt.token_ids == encoded.token_ids
        torch.testing.assert_close(group.prompt.media.tensors, encoded.media.tensors)
        assert all(one.media is None for one in group.completions)
    compare(model, processor, groups)


@pytest.mark.nightly
def test_a_conversation_has_its_images_in_memory_once(monkeypatch):
    """Each call sends those of all turns; what was read of a call stays as it was read."""
    model, processor = ending("qwen2_5_vl")
    shown = lambda row, turn: [png(picture(2, seed=turn)), {"type": "text", "text": "?"}]
    read, runs = [], []
    record, settle = Sessions.record, AgentSampler._settle
    monkeypatch.setattr(Sessions, "record", lambda self, call: (read.append(call), record(self, call)))
    monkeypatch.setattr(AgentSampler, "_settle", lambda self, run: (runs.append(run), settle(self, run)))
    groups = drawn(model, processor, shows(shown, 5), [row("qwen2_5_vl")], n=1)
    ((*earlier, last),) = [run.session.calls for run in runs]
    pixels = lambda call: call.group.prompt.media.tensors["pixel_values"]
    place = pixels(last).untyped_storage().data_ptr()
    assert {pixels(call).untyped_storage().data_ptr() for call in earlier} == {place}
    assert [call.group.prompt.media.count for call in (*earlier, last)] == [1, 2, 3, 4, 5]
    for call, before in zip((*earlier, last), read, strict=True):
        torch.testing.assert_close(call.group.prompt.media.tensors, before.group.prompt.media.tensors, atol=0, rtol=0)
    assert pixels(runs[0].session.calls[0]).untyped_storage().nbytes() > pixels(runs[0].session.calls[0]).nbytes
    (prompt,) = [group.prompt for group in groups]
    assert prompt.media.tensors["pixel_values"].untyped_storage().nbytes() == pixels(earlier[0]).nbytes


@pytest.mark.slow
def test_other_images_under_equal_tokens_are_other_episodes():
    """Two episodes, and two conversations in one, whose tokens are equal and whose images are not."""
    model, processor = ending("qwen2_5_vl")
    count = iter(range(8))

    def main(row, client):
        for _ in range(2):
            content = [png(picture(2, seed=next(count))), {"type": "text", "text": "q"}]
            client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": content}], max_tokens=8
            )
        return 1.0

    (group,) = drawn(model, processor, main, [row("qwen2_5_vl")], concurrency=1)
    assert group.prompt.media is None
    assert not set(banned_ids(model)) & set(group.prompt.token_ids)
    paths = [path for one in group.completions for path in (one, *one.episode.branches)]
    assert len(paths) == 4
    assert len({path.media.digests["image"] for path in paths}) == 4
    compare(model, processor, [type(group)(prompt=group.prompt, completions=tuple(paths))])


def test_the_row_reaches_the_agent_as_openai_sends_it_and_reads_back_the_same():
    model, processor = ending("qwen2_5_omni")
    sound, image = {**row("qwen2_5_omni", 1)}, {"prompt": [{"role": "user", "content": "q"}], "image": picture(2)}
    seen = []

    def main(row, client):
        seen.append(row["prompt"][0]["content"])
        client.chat.completions.create(model="policy", messages=row["prompt"], max_tokens=4)
        return 1.0

    groups = drawn(model, processor, main, [sound, image], n=1)
    assert {content[0]["type"] for content in seen} == {"input_audio", "image_url"}
    assert all(content[1] == {"type": "text", "text": "q"} for content in seen)
    for group, one in zip(groups, (sound, image), strict=True):
        encoded = prompt_of(processor, one, "x", ())
        assert group.prompt.media.digests == encoded.media.digests
        assert group.prompt.token_ids == encoded.token_ids
        torch.testing.assert_close(group.prompt.media.tensors, encoded.media.tensors, atol=0, rtol=0)


def test_frames_of_a_video_travel_as_images():
    prompt = prompt_of(
        acting_model("qwen2_5_omni")[1], {"prompt": [{"role": "user", "content": "q"}], "image": picture(1)}, "x", ()
    )
    told = openai_messages(type(prompt)(uid="x", token_ids=(1,), messages=({"role": "user", "content": [{"type": "video"}]},),
                                        media=prompt.media, columns={"video": [picture(1), picture(2)]}))  # fmt: skip
    assert [url[:22] for url in told[0]["content"][0]["video"]] == ["data:image/png;base64,"] * 2


BAD = {
    "file": ({"type": "image_url", "image_url": {"url": "FILE"}}, "no file and no other address is opened"),
    "file address": ({"type": "image_url", "image_url": {"url": "file://FILE"}}, "no file and no other address"),
    "network": ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "no other address is opened"),
    "itself": ({"type": "image", "image": "FILE"}, "no file and no other address"),
    "path": ({"type": "image", "path": "FILE"}, "no file and no other address"),
    "frames": ({"type": "video", "video": ["FILE"]}, "no file and no other address"),
    "sound": ({"type": "input_audio", "input_audio": {"data": "FILE", "format": "wav"}}, "no base64"),
    "kind": ({"type": "file", "file": {"file_id": "1"}}, "none of the parts that are read"),
    "broken": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "cannot be read as an image"),
    "modality": (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "reads text and images alone",
    ),
    "place": ({"type": "text", "text": "<|image_pad|>"}, "image"),
}  # fmt: skip


def test_a_part_that_cannot_be_read_is_refused_in_one_sentence_and_no_file_is_opened(tmp_path, monkeypatch):
    model, processor = ending("qwen2_5_vl")
    file = tmp_path / "secret.png"
    picture(1).save(file)
    opened, read = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (opened.append(str(self)), read(self, *a, **k))[1])
    said = {}

    def main(row, client):
        for name, (part, _) in BAD.items():
            sent = json.loads(json.dumps(part).replace("FILE", str(file)))
            messages = [{"role": "user", "content": [sent, {"type": "text", "text": "q"}]}]
            try:
                client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
            except openai.BadRequestError as error:
                said[name] = error.body["message"]
        client.chat.completions.create(model="policy", messages=row["prompt"], max_tokens=4)
        return 1.0

    drawn(model, processor, main, [row("qwen2_5_vl")], n=1)
    assert said.keys() == BAD.keys()
    for name, (_, words) in BAD.items():
        assert words in said[name], said[name]
    assert str(file) not in opened


def test_an_agent_of_a_text_prompt_with_an_image_is_told_to_write_messages():
    model, processor = ending("qwen2_5_vl")
    text = {"prompt": "<|vision_start|><|image_pad|><|vision_end|> q", **item("qwen2_5_vl")}
    with pytest.raises(DataError, match="plain text with images or sounds"):
        drawn(model, processor, shows(again), [text])
