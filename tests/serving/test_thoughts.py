"""Thoughts of reasoning models over HTTP: apart in replies, whole or streamed, and taken back in later turns."""

import json

import openai
import pytest

from covey.data.thoughts import ThoughtMarks, ThoughtStream, thought_marks
from covey.rollout import NativeSampler
from covey.serving import Endpoint, episodes_of
from covey.serving.sessions import Session, Sessions
from environments.acting import HARMONY, chat_tokenizer, tiny_llama
from environments.families import DEEPSEEK, FAMILIES, GLM, QWEN
from kit import rest_nightly
from serving.clients import Words, client

ASK = [{"role": "user", "content": "q"}]
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": NUMBERS}}
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=b>\nx y\n</parameter>\n</function>\n</tool_call>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
BOTH_WAYS = pytest.mark.parametrize("streamed", [False, True])


def sampler_of(template, *specials, eos="<|im_end|>"):
    tokenizer = chat_tokenizer(template, specials, eos)
    return NativeSampler(tiny_llama(tokenizer).eval(), tokenizer, dtype="float32")


@pytest.fixture(scope="module")
def qwen():
    return sampler_of(QWEN)


@pytest.fixture(scope="module")
def harmony():
    words = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
    return sampler_of(HARMONY, *words, eos="<|return|>")


def reply(sampler, written, streamed=False, messages=ASK, **how):
    """Content, thoughts, calls and finish reason of an answer for which the model writes `written`."""
    body = how.pop("extra_body", {})
    with Endpoint(sampler) as endpoint, client(endpoint.url) as ask, Words(sampler, written):
        create = lambda **more: ask.chat.completions.create(
            model="policy", messages=messages, max_tokens=500, extra_body=body, **how, **more
        )
        if not streamed:
            (choice,) = create().choices
            told = choice.message
            return told.content, getattr(told, "reasoning_content", None), told.tool_calls, choice.finish_reason
        content, thoughts, calls, finish = "", "", None, None
        for chunk in create(stream=True):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            calls, finish = choice.delta.tool_calls or calls, choice.finish_reason or finish
        return content, thoughts or None, calls, finish


@BOTH_WAYS
@pytest.mark.parametrize(
    ("written", "content", "thoughts"),
    [
        ("It is\n small.\n</think>\n\nNine.<|im_end|>", "Nine.", "It is\n small."),
        ("<think>\nAgain.</think>Nine.\n<|im_end|>", "Nine.\n", "Again."),
        ("\n</think>\n\nNine.<|im_end|>", "Nine.", None),
        ("No end, </thin<|im_end|>", "", "No end, </thin"),
        ("a</think>b</think>c<|im_end|>", "b</think>c", "a"),
    ],
)
def test_thoughts_that_the_prompt_opened_are_apart(qwen, written, content, thoughts, streamed):
    assert reply(qwen, written, streamed) == (content, thoughts, None, "stop")


def test_the_field_has_the_names_of_sglang_and_of_vllm_and_both_servers_switches(qwen):
    written = "Small.\n</think>\n\nNine.<|im_end|>"
    with Endpoint(qwen) as endpoint, client(endpoint.url) as ask, Words(qwen, written):
        message = ask.chat.completions.create(model="policy", messages=ASK, max_tokens=99).choices[0].message
    assert (message.reasoning_content, message.reasoning) == ("Small.", "Small.")
    whole = reply(qwen, written, extra_body={"separate_reasoning": False})
    assert whole == ("Small.\n</think>\n\nNine.", None, None, "stop")
    assert reply(qwen, written, extra_body={"include_reasoning": False}) == ("Nine.", None, None, "stop")


@BOTH_WAYS
def test_a_prompt_that_opens_no_thoughts_has_them_where_the_model_opens_them(streamed):
    sampler = sampler_of(GLM, "<|user|>", "<|observation|>", "<|assistant|>", eos="<|user|>")
    assert reply(sampler, "<think>Hm.</think>\nNine.<|user|>", streamed)[:2] == ("Nine.", "Hm.")
    assert reply(sampler, "Nine, not <think>.<|user|>", streamed)[:2] == ("Nine, not <think>.", None)


@BOTH_WAYS
def test_marks_that_are_special_tokens(streamed):
    template = QWEN.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    sampler = sampler_of(template, "[THINK]", "[/THINK]")
    assert reply(sampler, "Hm.[/THINK]Nine.<|im_end|>", streamed)[:2] == ("Nine.", "Hm.")


@BOTH_WAYS
def test_channels_of_harmony_are_content_and_thoughts(harmony, streamed):
    written = f"{ANALYSIS}<|channel|>final<|message|>Nine.<|return|>"
    assert reply(harmony, written, streamed)[:2] == ("Nine.", "Hm.")


@BOTH_WAYS
def test_a_call_within_thoughts_is_none_and_one_behind_them_is_typed(qwen, streamed):
    content, thoughts, calls, finish = reply(
        qwen, f"Not {CALL}.\n</think>\n\nNow.\n\n{CALL}<|im_end|>", streamed, tools=[ADD]
    )
    assert (content, thoughts, finish) == ("Now.", f"Not {CALL}.", "tool_calls")
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 7, "b": "x y"}]
    content, thoughts, calls, finish = reply(qwen, f"Now.\n\n{CALL}<|im_end|>", streamed, tools=[ADD])
    assert (content or "", thoughts, len(calls), finish) == ("", "Now.", 1, "tool_calls")  # a call ends thoughts


def test_a_stop_string_within_thoughts_ends_the_answer(qwen):
    assert reply(qwen, "Small. STOP", stop=["STOP"])[:2] == ("", "Small.")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_a_message_reach_the_template_by_any_name(qwen, name):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asked = [*ASK, {"role": "assistant", "tool_calls": [call], name: "I add."}, {"role": "tool", "content": "9"}]
    calls = []
    with Endpoint(qwen, on_call=calls.append) as endpoint, client(endpoint.url) as ask:
        ask.chat.completions.create(model="policy", messages=asked, max_tokens=1)
        with pytest.raises(openai.BadRequestError, match=r"messages\[1\] has thoughts"):
            ask.chat.completions.create(model="policy", messages=[ASK[0], {**asked[1], name: [1]}], max_tokens=1)
    assert "<think>\nI add.\n</think>" in qwen.tokenizer.decode(calls[0].group.prompt.token_ids)


def test_marks_are_learnt_from_the_template():
    marks = {name: thought_marks(chat_tokenizer(text)) for name, (text, *_) in FAMILIES.items() if "think>" in text}
    assert marks == {
        "GLM 4.6": ThoughtMarks("<think>", "</think>", "reasoning_content"),
        "Qwen 3.5": ThoughtMarks("<think>", "</think>", "reasoning_content"),
        "DeepSeek": ThoughtMarks("<think>", "</think>", None),
    }
    assert thought_marks(chat_tokenizer()) is None
    assert thought_marks(chat_tokenizer(DEEPSEEK)).field is None


@pytest.mark.parametrize("is_open", [False, True])
def test_pieces_of_any_size_are_what_the_whole_is(is_open):
    marks = ThoughtMarks("<think>", "</think>", None)
    for text in (
        "<think> a </think> b ",
        " a < </thin </think>",
        "<thin",
        "</think> x",
        "  ",
        "",
        "a\n<think>b</think>",
    ):
        for size in range(1, 9):
            stream = ThoughtStream(marks, is_open)
            pieces = [stream.push(text[i : i + size]) for i in range(0, len(text), size)] + [
                stream.push("", is_end=True)
            ]
            assert tuple("".join(part) for part in zip(*pieces, strict=True)) == marks.split(text, is_open), text


def talk(sampler, turns, change, tools=()):
    """Calls of one session of a run's endpoint: an agent that sends back answers as `change` makes them, and their episodes."""
    sessions, session = Sessions(4000, None, sampler.eos_ids), Session("a", 1)
    sessions.open(session)
    messages = list(ASK)
    with (
        Endpoint(sampler, name="policy", on_call=sessions.record, admit=sessions.admit) as endpoint,
        client(endpoint.url, key="a") as ask,
        Words(sampler, *(written for written, _ in turns)),
    ):
        for _, following in turns:
            how = {"tools": list(tools)} if tools else {}
            message = (
                ask.chat.completions.create(model="policy", messages=messages, max_tokens=300, **how).choices[0].message
            )
            messages = [*map(change, messages), message.model_dump(exclude_none=True), following]
            messages[-2:-1] = [change(messages[-2])]
    return episodes_of(session.calls)


def without(message):
    return {name: value for name, value in message.items() if not name.startswith("reasoning")}


def by_another_name(message):
    return without(message) | ({"thinking": message["reasoning"]} if "reasoning" in message else {})


def edited(message):
    return message | ({"reasoning_content": "Other.", "reasoning": "Other."} if "reasoning" in message else {})


FOLLOWING = {"role": "user", "content": "more"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "9"}


@pytest.mark.parametrize("change", rest_nightly([dict, without, by_another_name], [dict, without]))
@pytest.mark.parametrize(
    "turns",
    [
        [("A.\n</think>\n\nOne.<|im_end|>", FOLLOWING), ("B.\n</think>\n\nTwo.<|im_end|>", FOLLOWING)],
        [
            (f"A.\n</think>\n\nNow.\n\n{CALL}<|im_end|>", RESULT),
            ("B.\n</think>\n\nTwo.<|im_end|>", FOLLOWING),
            ("C.\n</think>\n\nThree.<|im_end|>", FOLLOWING),
        ],
    ],
    ids=["chat", "tools"],
)
def test_an_agent_that_sends_thoughts_back_or_leaves_them_out_goes_on_from_the_tokens_that_were_drawn(
    qwen, turns, change
):
    found = talk(qwen, turns, change, tools=[ADD] if len(turns) == 3 else ())
    assert (len(found.episodes), found.num_breaks) == (1, 0)
    (episode,) = found.episodes
    drawn = episode.completion.token_ids[episode.completion.mask]
    assert qwen.tokenizer.decode(drawn) == "".join(written for written, _ in turns)
    whole = qwen.tokenizer.decode([*episode.prompt.token_ids, *episode.completion.token_ids])
    assert whole.count("<think>\n") == len(turns)


def test_thoughts_that_the_agent_changed_are_another_history(qwen):
    turns = [("A.\n</think>\n\nOne.<|im_end|>", FOLLOWING), ("B.\n</think>\n\nTwo.<|im_end|>", FOLLOWING)]
    found = talk(qwen, turns, edited)
    assert (len(found.episodes), found.num_breaks) == (2, 1)
