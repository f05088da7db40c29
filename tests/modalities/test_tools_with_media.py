"""Tools and environments for prompts with images or sounds: these stay attached over all turns, in every sampler and in the learner."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
import torch
from acting_models import PARTS_ALONE, acting_template, item, prompt_of, row, rows_of, seeing_caller
from media_prompts import ALL, EMBEDDED, prompts, tiny_of
from models import picture

from covey.data.prompts import to_prompt
from covey.environments import EnvironmentPool, Episodes, EpisodeSampler, Template, tools_of
from covey.environments.calls import Request, ToolRunner
from covey.errors import DataError, ModelError
from covey.learner import Policy
from covey.models.modalities import banned_ids
from covey.rollout import SamplingParams, choose_sampler
from covey.rollout.agreement import plain_logprobs
from covey.runs import serialization
from covey.types import Media
from environments.acting import chat_tokenizer
from environments.tool_runs import add
from kit import rest_nightly

pytestmark = pytest.mark.filterwarnings("ignore:.*plain transformers:UserWarning")
BACKENDS = ("auto", "transformers")


def often_ending(kind):
    """A model of random weights that ends its turns after a few tokens."""
    model, processor = tiny_of(kind)
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.weight.shape[0]))
        model.lm_head.bias[processor.tokenizer.eos_token_id] = 6.0
    return model, processor


def answering(turns):
    """A long answer and a short one by turns: the one is prefilled, the other rides along in decode steps."""
    long = list(range(40, 60))
    return [(long if turn.sample % 2 else [41, 42]) if len(turn.token_ids) < 30 else None for turn in turns]


def drawn(model, processor, found, backend, params, **made_of):
    made_of |= {} if backend == "generate" else {"dtype": "float32"}
    sampler = choose_sampler(model, processor.tokenizer, backend=backend, environment=answering, **made_of)
    return sorted(sampler.sample(found, 2, params), key=lambda group: group.prompt.uid)


def compare(model, processor, groups):
    """Log-probabilities of the sampler, of a plain forward over ids and pixels, and of the learner."""
    completions = [one for group in groups for one in group.completions]
    rows = rows_of(groups)
    with torch.no_grad():
        measured = Policy(model, pad_id=processor.tokenizer.pad_token_id).measure(rows).logp
    for i, (one, expected) in enumerate(zip(completions, plain_logprobs(model, groups), strict=True)):
        torch.testing.assert_close(one.logprobs[one.mask], expected[one.mask], atol=1e-5, rtol=1e-5)
        learnt = measured[i, : one.num_tokens]
        torch.testing.assert_close(learnt[one.mask], expected[one.mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "backend"),
    rest_nightly(product(ALL, BACKENDS), {("qwen2_5_vl", "auto"), ("llava", "transformers")}),
)
def test_log_probabilities_over_turns_are_a_plain_forwards(kind, backend):
    model, processor = often_ending(kind)
    found = prompts(processor, kind)
    groups = drawn(model, processor, found, backend, SamplingParams(max_tokens=60, seed=5))
    assert all((~one.mask).any() for group in groups[:2] for one in group.completions)
    assert [group.prompt.media is None for group in groups][:3] == [False, False, True]
    compare(model, processor, groups)
    for group in groups[:2]:  # the answers' tokens would be others' without the pixels
        assert group.prompt.media is found[int(group.prompt.uid[-1])].media


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_nightly(EMBEDDED, 1))
def test_greedy_turns_are_the_same_in_every_sampler(kind):
    model, processor = often_ending(kind)
    params = SamplingParams(max_tokens=50, temperature=0.0)
    native, plain, by_generate = (
        drawn(
            model,
            processor,
            prompts(processor, kind),
            backend,
            params,
            **({"generate": {}} if backend == "generate" else {}),
        )
        for backend in ("native", "transformers", "generate")
    )
    for one, other, third in zip(native, plain, by_generate, strict=True):
        for a, b, c in zip(one.completions, other.completions, third.completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist() == c.token_ids.tolist()
            assert a.mask.tolist() == b.mask.tolist() == c.mask.tolist()


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_no_later_turn_draws_a_placeholder_and_no_answer_may_hold_one(backend):
    model, processor = often_ending("llava")
    banned = banned_ids(model)
    with torch.no_grad():
        model.lm_head.bias[list(banned)] = 50.0
    found = prompts(processor, "llava")[:1]
    groups = drawn(model, processor, found, backend, SamplingParams(max_tokens=60, seed=5))
    assert {token for group in groups for one in group.completions for token in one.token_ids.tolist()}.isdisjoint(
        banned
    )
    sampler = choose_sampler(
        model,
        processor.tokenizer,
        backend=backend,
        dtype="float32",
        environment=lambda turns: ["<image>" for _ in turns],
    )
    with pytest.raises(DataError, match=r"reply to a completion of prompt 0:0 holds a token that stands for an image"):
        list(sampler.sample(found, 2, SamplingParams(max_tokens=40, seed=1)))


def episodes(processor, tools=(add,)):
    made, tokenizer = tools_of(tools), processor.tokenizer
    options = {"chat_template": processor.chat_template, "tools": [one.schema for one in made]}
    return Episodes(Template(tokenizer, [tokenizer.eos_token_id], options), made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    rest_nightly(
        [("qwen2_audio", "auto"), ("idefics3", "transformers"), ("qwen2_5_vl", "auto"), ("gemma3n", "auto")], 1
    ),
)
def test_a_model_that_looks_calls_a_tool_and_reads_the_answer(kind, backend):
    model, processor = seeing_caller(kind)
    make = lambda hook: choose_sampler(model, processor.tokenizer, backend=backend, environment=hook, dtype="float32")
    found = [prompt_of(processor, row(kind, i), f"0:{i}") for i in range(2)]
    sampler = EpisodeSampler(make, episodes(processor))
    groups = list(sampler.sample(found, 2, SamplingParams(max_tokens=200, temperature=0.01, seed=3)))
    for group in groups:
        for one in group.completions:
            assert [(call.name, call.result) for call in one.tool_calls] == [("add", "7")]
            assert one.messages[-1] == {"role": "assistant", "content": "7"}
    compare(model, processor, list(sampler.sample(found, 2, SamplingParams(max_tokens=200, seed=3))))
    states = {one.episode.states[0] for group in groups for one in group.completions}
    assert len(states) == 2, "a state is the image, too"


# -- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava", "qwen2_audio"])
def test_an_answer_reaches_a_template_that_reads_parts_alone(kind):
    tokenizer = chat_tokenizer(acting_template(kind))
    template = Template(tokenizer, [tokenizer.eos_token_id], {"tools": [one.schema for one in tools_of([add])]})
    answer = {"role": "tool", "name": "add", "content": "seven <|im_end|>", "tool_call_id": template.call_id("add")}
    ids = list(template.reply([answer]).token_ids)
    assert tokenizer.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\nseven <|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(tokenizer.eos_token_id) == 1
    assert (kind in PARTS_ALONE) == ("tool" in template._in_parts)


def test_a_template_that_leaves_answers_out_is_refused():
    text = acting_template("qwen2_5_vl")
    tokenizer = chat_tokenizer(
        text.replace("{% if m.role == 'tool' %}", "{% if m.role == 'tool' and false %}").replace(
            "{% else %}<|im_start|>{{ m.role }}", "{% elif m.role != 'tool' %}<|im_start|>{{ m.role }}"
        )
    )
    with pytest.raises(ModelError, match="leaves out what a tool answers"):
        Template(tokenizer, [tokenizer.eos_token_id], {"tools": [one.schema for one in tools_of([add])]})


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_that_are_json_stay_json():
    def search() -> list:
        """Search."""
        return [{"type": "text", "text": "a"}, {"type": "news", "image": "x.png"}]

    (made,) = tools_of([search])
    (done,) = ToolRunner().run([Request("search", {}, {"search": made})])
    assert (done.status, done.result[:16]) == ("ok", '[{"type": "text"')


# -- what reset returns -----------------------------------------------------------------------------------------------


class Shown:
    """An environment whose `reset` returns what it was made of."""

    def __init__(self, returned=" now"):
        self.returned = returned

    def reset(self, **row):
        return self.returned

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b


def encoder(processor, tokenizer=None):
    def encode(messages, prompt, tools):
        made = {**prompt.columns, "prompt": messages}
        options = {"tools": [one.schema for one in tools]}
        return to_prompt(made, prompt.uid, f"prompt {prompt.uid}", tokenizer or processor.tokenizer, options, processor)

    return encode


def reset(returned, processor, prompt):
    return EnvironmentPool(lambda: Shown(returned)).reset(prompt, 2, encoder(processor))[0]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava", "qwen2_audio"])
def test_text_of_reset_is_encoded_with_the_item_of_the_row(kind):
    from acting_models import acting_model

    _, processor = acting_model(kind)
    before = prompt_of(processor, row(kind, 1, "q"))
    after = reset(" now", processor, before)
    whole = prompt_of(processor, row(kind, 1, "q now"))
    assert after.token_ids == whole.token_ids
    assert after.media.tensors.keys() == whole.media.tensors.keys()
    for name, value in after.media.tensors.items():
        torch.testing.assert_close(value, whole.media.tensors[name])
    assert reset(None, processor, before) is before


def test_a_picture_of_reset_joins_that_of_the_row():
    from acting_models import acting_model

    _, processor = acting_model("qwen2_5_vl")
    parts = [{"type": "text", "text": " or "}, {"type": "image", "image": picture(3, (64, 32), 2)}]
    for columns, count in ((item("qwen2_5_vl"), 2), ({}, 1)):
        before = prompt_of(processor, {"prompt": [{"role": "user", "content": "q"}], **columns})
        after = reset(parts, processor, before)
        assert (after.media.count, len(after.media.tensors["image_grid_thw"])) == (count, count)
        assert after.messages[-1]["content"][-1] == {"type": "image"}


def test_what_reset_may_not_return_and_where_an_item_may_not_be_are_said():
    from acting_models import acting_model

    _, processor = acting_model("llava")
    plain = prompt_of(processor, row("llava"))
    with pytest.raises(
        DataError, match=r"reset\(\) of Shown returned Image; return text, None, or for an image a list of parts"
    ):
        reset(picture(1), processor, plain)
    parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "q"}]
    inside = prompt_of(processor, {"prompt": [{"role": "user", "content": parts}]})
    with pytest.raises(
        DataError, match=r"prompt 0:0 holds an image or a sound inside of a message.*put it into a column"
    ):
        reset(" now", processor, inside)
    assert reset(None, processor, inside) is inside
    tokenizer = chat_tokenizer()
    text = to_prompt({"prompt": [{"role": "user", "content": "q"}]}, "0:0", "row", tokenizer, {})
    with pytest.raises(DataError, match="has images, but the model or its processor takes text alone"):
        EnvironmentPool(lambda: Shown(parts)).reset(text, 1, encoder(None, tokenizer))


def test_completions_share_the_media_of_their_prompt():
    prompt = Media(
        tensors={"pixels": torch.randn(6, 4), "sizes": torch.ones(1, 2)}, token_types={"kinds": torch.ones(3)}
    )
    first = Media(
        tensors={"pixels": torch.randn(2, 5), "sizes": torch.zeros(1, 2)}, token_types={"kinds": torch.ones(2)}
    )
    second = Media(tensors={"sounds": torch.randn(1, 3)})
    rows = [first.behind(prompt, 7), second.behind(first.behind(prompt, 7), 12), second.behind(None, 2)]
    padded = torch.nn.functional.pad
    pixels = torch.cat([padded(prompt.tensors["pixels"], (0, 1)), first.tensors["pixels"]])
    for made in rows[:2]:
        assert torch.equal(made.tensors["pixels"], pixels)
        assert torch.equal(made.tensors["sizes"], torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        assert made.tensors.parts[0] is prompt.tensors
    assert list(rows[1].tensors) == ["pixels", "sizes", "sounds"]
    assert len(rows[1].tensors) == 3
    assert "sounds" not in rows[0].tensors
    assert rows[0].tensors.get("sounds") is None
    assert rows[2].tensors["sounds"] is second.tensors["sounds"]
    assert rows[0].token_types["kinds"].tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1]
    for copied in (pickle.loads(pickle.dumps(rows)), serialization.decode(*serialization.encode(rows))):
        for made, other in zip(rows, copied, strict=True):
            assert {name: x.tolist() for name, x in other.tensors.items()} == {
                n: x.tolist() for n, x in made.tensors.items()
            }
