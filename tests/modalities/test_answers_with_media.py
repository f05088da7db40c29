"""Answers of tools with images and sounds: the model sees them in its next turn, sampled and learnt as a plain forward over the conversation."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from types import SimpleNamespace as Part

import numpy as np
import pytest
import torch
from acting_models import acting_model, add_shown, answered, item, prompt_of, row, rows_of, template_of
from models import picture

from covey.data.media import png
from covey.environments import Episodes, EpisodeSampler, Template, tool, tools_of
from covey.environments.call_forms import WrittenCall
from covey.environments.calls import Request, ToolRunner
from covey.environments.check import examine
from covey.environments.contents import shown_parts
from covey.environments.mcp import _call
from covey.environments.stepping import Stepped
from covey.errors import DataError
from covey.learner import Policy
from covey.models.modalities import banned_ids, forget_positions
from covey.rewards.contract import Batch
from covey.rollout import SamplingParams, choose_sampler
from covey.rollout.agreement import plain_logprobs
from covey.rollout.environments import Answer, Turn
from covey.runs import serialization
from covey.types import Completion, Group, Prompt
from environments.acting import chat_tokenizer
from environments.tool_runs import CALL
from kit import rest_nightly
from modalities.agents import ending

pytestmark = pytest.mark.filterwarnings("ignore:.*plain transformers:UserWarning")
CASES = [
    (kind, way)
    for way in ("auto", "transformers", "generate")
    for kind in ("qwen2_5_vl", "qwen3_5", "idefics3", "gemma3", "qwen2_audio")
]


def look(n: int) -> list:
    """Look around.

    Args:
        n: Where.
    """
    kind = "qwen2_5_vl" if n < 100 else "qwen2_audio"
    (name, first), (_, second) = [*item(kind, n % 5).items(), *item(kind, n % 5 + 1).items()]
    return [{"type": "text", "text": f"at {n}"}, {"type": name, name: first}, {"type": name, name: second}]


def photograph(n: int):
    """Take a picture.

    Args:
        n: Of what.
    """
    return picture(1 + n % 3, seed=n)


def episodes(processor, tools, asks, turns=2):
    """Episodes in which every turn of the model counts as the calls that `asks` makes of its number of tokens."""
    template = template_of(processor, tools)
    read = template.turn_in
    template.turn_in = lambda ids, before: (*read(ids, before)[:1], asks(len(ids)), {})
    made = Episodes(template, tools_of(tools))
    made.limits = type(made.limits)(turns=turns)
    return made


def drawn(model, processor, rows, tools, asks, backend="auto", max_tokens=500, **made):
    options = {"generate": {}} if backend == "generate" else {"dtype": "float32"}
    make = lambda hook: choose_sampler(model, processor.tokenizer, backend=backend, environment=hook, **options)
    sampler = EpisodeSampler(make, episodes(processor, tools, asks, **made))
    found = [prompt_of(processor, one, f"0:{i}", tools) for i, one in enumerate(rows)]
    groups = sampler.sample(found, 2, SamplingParams(max_tokens=max_tokens, seed=3))
    return sorted(groups, key=lambda group: group.prompt.uid)


def compare(model, processor, groups):
    """Log-probabilities of sampler and learner with a plain forward over each whole conversation."""
    completions = [one for group in groups for one in group.completions]
    rows = rows_of(groups)
    with torch.no_grad():
        measured = Policy(model, pad_id=processor.tokenizer.pad_token_id, packs_always=True).measure(rows).logp
    for i, (one, plain) in enumerate(zip(completions, plain_logprobs(model, groups), strict=True)):
        assert one.written.any()
        assert not torch.isin(one.token_ids[one.written], torch.tensor(banned_ids(model))).any()
        torch.testing.assert_close(measured[i, : len(plain)][one.written], plain[one.written], atol=1e-5, rtol=1e-5)
        if one.logprobs is not None:
            torch.testing.assert_close(one.logprobs[one.written], plain[one.written], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "backend"), rest_nightly(CASES, [("qwen2_5_vl", "auto")]))
def test_several_items_in_answers_of_two_tools_are_sampled_and_learnt_as_a_plain_forward_sees_them(kind, backend):
    model, processor = ending(kind)
    offset = 100 * (kind == "qwen2_audio")
    asks = lambda n: [WrittenCall("look", {"n": n + offset}), WrittenCall("look", {"n": n + 1 + offset})]
    rows = [row(kind, 0), {"prompt": [{"role": "user", "content": "q"}]}]
    groups = drawn(model, processor, rows, (look,), asks, backend)
    counts = [{one.media.count for one in group.completions} for group in groups]
    assert counts == [{9}, {8}]  # of two turns with two calls each, and the row's own
    for group in groups:
        for one in group.completions:
            assert [call.status for call in one.tool_calls] == ["ok"] * 4
            assert len(one.media.previews) == one.media.count
    compare(model, processor, groups)


def test_the_pixels_that_are_learnt_are_those_of_the_images_in_their_order():
    """Against inputs that are put together here, from each image by the image processor and from the ids."""
    model, processor = ending("qwen2_5_vl")
    asks = lambda n: [WrittenCall("photograph", {"n": 1}), WrittenCall("photograph", {"n": 2})]
    groups = drawn(model, processor, [row("qwen2_5_vl")], (photograph,), asks, turns=1)
    (group,) = groups
    one, prompt = group.completions[0], group.prompt
    images = [item("qwen2_5_vl")["image"], photograph(1), photograph(2)]
    made = [processor.image_processor(images=[image], return_tensors="pt") for image in images]
    ids = torch.tensor([[*prompt.token_ids, *one.token_ids.tolist()]])
    inputs = {name: torch.cat([each[name] for each in made]) for name in ("pixel_values", "image_grid_thw")}
    kinds = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **inputs).logits[0]
    forget_positions(model)
    logits = logits[len(prompt.token_ids) - 1 : -1].index_fill(-1, torch.tensor(banned_ids(model)), -1e4)
    plain = torch.log_softmax(logits, -1).gather(-1, one.token_ids[:, None])[:, 0]
    torch.testing.assert_close(one.logprobs[one.written], plain[one.written], atol=1e-5, rtol=1e-5)
    assert [turn["content"][0].keys() for turn in one.messages if turn["role"] == "tool"] == [{"type", "digest"}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", rest_nightly(["auto", "transformers"], 1))
def test_a_cut_never_splits_an_image(backend):
    """Whatever room is left, an answer with an image is there as a whole or ends before its placeholders."""
    model, processor = ending("qwen2_5_vl")
    asks = lambda n: [WrittenCall("photograph", {"n": 1})]
    place, ends = model.config.image_token_id, set()
    for room in (30, 42, 50, 90):
        for one in drawn(model, processor, [row("qwen2_5_vl")], (photograph,), asks, backend, max_tokens=room)[
            0
        ].completions:
            num_places = int((one.token_ids == place).sum())
            grid = [] if one.media is None else one.media.tensors["image_grid_thw"][1:]
            assert num_places == sum(int(each.prod()) // 4 for each in grid)
            assert one.num_tokens <= room
            ends.add((one.finish, num_places > 0))
    assert ("length", False) in ends
    assert any(has_image for _, has_image in ends)


def broken(n: int) -> list:
    """Look.

    Args:
        n: Where.
    """
    return [{"type": "image", "image": b"no image" if n else picture(1).resize((400, 1))}]


@pytest.mark.parametrize(
    ("n", "words"), rest_nightly([(1, "cannot be read as an image"), (0, "refused its images")], 1)
)
def test_an_image_that_cannot_be_read_is_the_tools_error(n, words):
    model, processor = ending("qwen2_5_vl")
    asks = lambda _: [WrittenCall("broken", {"n": n}), WrittenCall("photograph", {"n": 1})]
    for one in drawn(model, processor, [row("qwen2_5_vl")], (broken, photograph), asks, turns=1)[0].completions:
        assert [call.status for call in one.tool_calls] == ["error", "ok"]
        assert words in one.tool_calls[0].result
        assert one.media.count == 2


def search(n: int) -> str:
    """Search.

    Args:
        n: Of what.
    """
    return "the token <|image_pad|>"


@pytest.mark.parametrize("name", rest_nightly(["search", "<|image_pad|>"], ["<|image_pad|>"]))
def test_a_text_that_spells_a_placeholder_beside_an_image_does_not_end_the_run(name):
    """The processor cannot tell both apart, so the image is an error: the text, or the name that the model calls, is not its tool's."""
    model, processor = ending("qwen2_5_vl")
    asks = lambda _: [WrittenCall(name, {"n": 1}), WrittenCall("photograph", {"n": 1})]
    for one in drawn(model, processor, [row("qwen2_5_vl")], (search, photograph), asks, turns=1)[0].completions:
        assert "2 image tokens for 1" in one.tool_calls[1].result or "3 image tokens for 1" in one.tool_calls[1].result
        assert [call.status for call in one.tool_calls] == ["ok" if name == "search" else "error", "error"]
        assert one.media is None  # but for the prompt's
        assert not torch.isin(one.token_ids, torch.tensor(banned_ids(model))).any()


def test_an_episode_begins_anew_where_its_completion_is_written_with_other_tokens():
    """Plain transformers goes on for an engine that cannot compute an answer, and rounds otherwise: its turn may be another, and longer."""
    _, processor = acting_model("qwen2_5_vl")
    encode = lambda text: tuple(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    made = Episodes(template_of(processor, (add_shown,)), tools_of([add_shown]))
    prompt = prompt_of(processor, row("qwen2_5_vl"))
    made.begin(prompt, [None])
    for text in (CALL, "a" * 400 + CALL):
        (answer,) = made([Turn(prompt=prompt, sample=0, token_ids=encode(text), text=text)])
        ids = (*encode(text), *answer.token_ids)
    done = Completion(token_ids=torch.tensor(ids), text="", finish="length")
    (one,) = made.end(Group(prompt=prompt, completions=(done,))).completions
    assert [turn["role"] for turn in one.messages] == ["assistant", "tool"]
    assert one.messages[0]["content"].startswith("aaa")
    assert len(one.tool_calls) == 1


FORMS = {
    "a part": (lambda image: {"type": "image", "image": image}, "<image>"),
    "parts in a tuple": (lambda image: ({"type": "text", "text": "a"}, {"type": "image", "image": image}), "a<image>"),
    "texts and parts": (lambda image: ["a", {"type": "image", "image": image}, {"n": 1}], 'a<image>{"n": 1}'),
    "a mapping": (lambda image: {"image": image, "n": 1}, "an image is inside of a dict; return it"),
    "lists in a list": (lambda image: [image, [image]], "an image is inside of a list; return it"),
    "JSON": (lambda image: {"type": "image", "image": "a.png"}, '{"type": "image", "image": "a.png"}'),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_that_is_returned_is_never_its_repr(form):
    make, words = FORMS[form]
    made = replace(*tools_of([photograph]), call=lambda n: make(picture(2)))
    _, processor = acting_model("qwen2_5_vl")
    (done,) = ToolRunner(processor.tokenizer, processor).run([Request("see", {"n": 1}, {"see": made})])
    assert words in done.result
    assert (done.status == "error") == words.startswith("an image")
    assert any(part["type"] == "image" for part in done.parts) == ("<image>" in words)


PIXELS = np.asarray(picture(1, (32, 24)))
ARRAYS = {
    "numpy": PIXELS,
    "torch, colours first": torch.tensor(PIXELS).permute(2, 0, 1),
    "frames in a mapping": {"frames": PIXELS[None], "n": 1},
    "beside a part": ["a", {"type": "image", "image": picture(1)}, PIXELS],
}
SHAPED = [Part(shape=shape, dtype="uint8") for shape in (None, 7, "abc", len, (3, None, 500), ([3], 40, 40))]


@pytest.mark.parametrize("kind", ARRAYS)
def test_pixels_that_are_returned_are_never_an_abbreviated_text(kind):
    made = replace(*tools_of([photograph]), call=lambda n: ARRAYS[kind])
    _, processor = acting_model("qwen2_5_vl")
    with pytest.raises(
        DataError, match=r"an array of bytes of the shape .*return PIL.Image.fromarray\(array\) to show it, or"
    ):
        ToolRunner(processor.tokenizer, processor).run([Request("see", {"n": 1}, {"see": made})])


@pytest.mark.parametrize("value", [PIXELS[:2, :2], PIXELS[..., 0], PIXELS / 255, PIXELS[:2, :2].tolist(), *SHAPED])
def test_arrays_of_other_numbers_and_other_objects_stay_text(value):
    made = replace(*tools_of([photograph]), call=lambda n: value)
    (done,) = ToolRunner().run([Request("see", {"n": 1}, {"see": made})])
    assert done.result == str(value)
    assert json.loads(Stepped(Part(reset=lambda seed: PIXELS), {}, "").reset()) == PIXELS.tolist()


def refused(function, template=None, runner=None):
    (made,) = tools_of([function])
    runner = runner or ToolRunner(template.tokenizer, template.processor, template.shows)
    with pytest.raises(DataError) as caught:
        runner.run([Request(made.name, {"n": 101}, {made.name: made})])
    return str(caught.value)


def openai_form(n: int) -> list:
    """Look.

    Args:
        n: Where.
    """
    return [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


def test_media_that_the_model_is_not_shown_end_the_run_by_the_tools_name():
    _, processor = acting_model("qwen2_5_vl")
    template = template_of(processor, (look,))
    assert (
        "tool 'photograph' returned a part of the type 'image', which the model or its processor does not read"
        in refused(photograph, runner=ToolRunner())
    )
    assert "tool 'look' returned a part of the type 'audio', which the model or its processor does not read" in refused(
        look, template
    )
    assert "what tool 'openai_form' returned has a part of OpenAI's form" in refused(openai_form, template)
    tokenizer = chat_tokenizer()  # whose template writes a list as Python does
    text = Template(tokenizer, [tokenizer.eos_token_id], {"tools": []}, processor=processor)
    assert "which the chat template leaves out of a tool's answer" in refused(photograph, text)


@tool(isolated=True, timeout=60)
def draw(n: int):
    """Draw a picture.

    Args:
        n: Of what.
    """
    return ["a", picture(2, seed=n)]


@pytest.mark.slow
def test_a_tool_in_a_process_of_its_own_returns_the_same_image():
    _, processor = acting_model("qwen2_5_vl")
    (made,) = tools_of([draw])
    runner = ToolRunner(processor.tokenizer, processor)
    (done,) = runner.run([Request("draw", {"n": 4}, {"draw": made})])
    runner.close()
    assert done.status == "ok", done.result
    (completion,) = Batch.of([group_of(done)]).completions
    assert completion[0]["content"][0] == {"type": "text", "text": "a"}
    assert completion[0]["content"][1]["image"].tobytes() == picture(2, seed=4).tobytes()


def group_of(call):
    message = {"role": "tool", "name": call.name, "content": shown_parts(call.parts)}
    done = Completion(token_ids=torch.tensor([1]), text="", finish="stop", messages=(message,), tool_calls=(call,))
    return Group(prompt=Prompt(uid="0:0", token_ids=(1,), messages=()), completions=(done,))


def test_limits_cut_the_text_beside_an_image_and_a_checkpoint_holds_all_of_it(tmp_path):
    _, processor = acting_model("qwen2_audio")

    @tool(max_characters=5)
    def listen() -> list:
        """Listen."""
        return [
            {"type": "text", "text": "abc"},
            {"type": "audio", **item("qwen2_audio", 1)},
            {"type": "text", "text": "defg"},
        ]

    (made,) = tools_of([listen])
    (done,) = ToolRunner(processor.tokenizer, processor).run([Request("listen", {}, {"listen": made})])
    assert done.result == "abcde\n[2 more characters were cut]<audio>"
    serialization.write({"group": group_of(done)}, tmp_path / "state")
    read = serialization.read(tmp_path / "state")["group"]
    (before,), (after,) = Batch.of([group_of(done)]).completions, Batch.of([read]).completions
    sound = item("qwen2_audio", 1)["audio"]
    assert before[0]["content"][1]["audio"]["sampling_rate"] == after[0]["content"][1]["audio"]["sampling_rate"]
    assert (before[0]["content"][1]["audio"]["array"] == after[0]["content"][1]["audio"]["array"]).all()
    assert sound is not None


def test_parts_of_mcp_arrive_as_media():
    _, processor = acting_model("qwen2_5_vl")
    content = [Part(type="text", text="a"), Part(type="image", data=base64.b64encode(png(picture(2))).decode())]
    session = Part(call=lambda *_: Part(content=content, is_error=False))
    returned = _call(session, "see", 1.0)
    (made,) = tools_of([photograph])
    (done,) = ToolRunner(processor.tokenizer, processor).run(
        [Request("see", {"n": 1}, {"see": replace(made, name="see", call=lambda n: returned)})]
    )
    assert (done.status, done.result) == ("ok", "a<image>")
    assert Batch.of([group_of(done)]).completions[0][0]["content"][1]["image"].tobytes() == picture(2).tobytes()


class Moving:
    """A stepped environment whose observations are pictures."""

    def reset(self, seed):
        return "go"

    def step(self, action):
        return picture(1 + action["n"] % 3), 1.0, False

    def close(self):
        pass


def test_a_stepped_environment_shows_pictures():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    made = Stepped(Moving(), schema, "Step.")
    made.reset()
    assert made.step(n=1)[0]["image"].size == picture(2).size
    report = examine(lambda: Stepped(Moving(), schema, "Step."), episodes=2, turns=2)
    assert report.is_repeatable
    assert not any(walk.errors for walk in report.walks)


def test_media_behind_others_keep_their_order_and_the_kinds_of_tokens():
    _, processor = acting_model("gemma3")
    prompt, reply = prompt_of(processor, row("gemma3"), "0:0"), answered(processor)
    assert isinstance(reply, Answer)
    media = reply.media.behind(prompt.media, len(prompt.token_ids) + 3)
    whole = (*prompt.token_ids, 1, 1, 1, *reply.token_ids)
    assert media.digests["image"] == prompt.media.digests["image"] + reply.media.digests["image"]
    assert media.token_types
    for name, kinds in media.token_types.items():
        assert len(kinds) == len(whole)
        assert kinds.tolist() == [
            *prompt.media.token_types[name].tolist(),
            0,
            0,
            0,
            *reply.media.token_types[name].tolist(),
        ]
        assert reply.media.token_types[name].any()
