"""Chat templates: the form of a tool call is learnt from them, and answers never change what came before."""

import glob
import json
import re
from pathlib import Path

import pytest

from covey.environments import Template, tools_of
from covey.environments.call_forms import typed_argument
from covey.errors import ModelError
from environments.acting import CHATML, calls_in, chat_tokenizer


def add(a: int, b: str) -> int:
    """Add.

    Args:
        a: The first.
        b: The second.
    """
    return a + len(b)


TURNS = "{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
PLAIN = "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endif %}"
CALLS = "{% if m.tool_calls %}<|start|>assistant\n{{ m.content or '' }}{% for c in m.tool_calls %}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
TOOL = "{% endfor %}<|end|>{% elif m.role == 'tool' %}<|start|>tool\n{{ m.content }}<|end|>"


def family(call: str) -> str:
    return TURNS + CALLS + call + TOOL + PLAIN + END


FAMILIES = {
    "Hermes, Qwen 2.5 and 3": CHATML,
    "Llama 3.1": family('{"name": "{{ c.function.name }}", "parameters": ' + ARGUMENTS + "}"),
    "Mistral": family(
        '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": ' + ARGUMENTS + ', "id": "{{ c.id }}"}]'
    ),
    "DeepSeek": family(
        "<|calls|><|call|>function<|sep|>{{ c.function.name }}\n```json\n" + ARGUMENTS + "\n```<|callend|>"
    ),
    "gpt-oss": family(" to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>" + ARGUMENTS),
    "Qwen 3.5 and Qwen3-Coder": family(
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "GLM 4.5": family(
        "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
    ),
    "Granite": family('<|tool_call|>[{"name": "{{ c.function.name }}", "arguments": ' + ARGUMENTS + "}]"),
}
"""The forms of tool calls that today's families write, each in a template of its own."""


def of(template: str) -> tuple[Template, object]:
    words = tuple(sorted(set(re.findall(r"<\|[a-z]+\|>|\[TOOL_CALLS\]", template))))
    tokenizer = chat_tokenizer(template, words)
    ends = [tokenizer.convert_tokens_to_ids(word) for word in ("<|end|>", "<|im_end|>")]
    schemas = [one.schema for one in tools_of([add])]
    return Template(tokenizer, [one for one in ends if one is not None], {"tools": schemas}), tokenizer


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("content", ["", "Let me see."])
def test_a_call_that_a_template_writes_is_read_back(name, content):
    template, _ = of(FAMILIES[name])
    if content and name == "Llama 3.1":
        pytest.skip("its calls are whole turns")
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": "7", "b": "x y"}}}
    ask = [{"role": "user", "content": "q"}]
    start = template._render(ask, tokenize=True, add_generation_prompt=True)
    whole = template._render([*ask, {"role": "assistant", "content": content, "tool_calls": [call]}], tokenize=True)
    text, calls = calls_in(template, whole[len(start) :])
    assert [(one.name, one.arguments, one.problem) for one in calls] == [("add", {"a": "7", "b": "x y"}, None)]
    assert text.startswith(content)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_without_a_call_has_none(name):
    template, tokenizer = of(FAMILIES[name])
    text, calls = calls_in(template, tokenizer("The answer is 7.<|im_end|>")["input_ids"])
    assert (text, calls) == ("The answer is 7.", [])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("result", ["9", "", "two\nlines", '{"error": "x"}', "<tool_call>", "答え"])
def test_an_answer_is_what_the_template_would_write_after_the_turn(name, result):
    template, _ = of(FAMILIES[name])
    answer = {"role": "tool", "name": "add", "content": result, "tool_call_id": "abcdefghi"}
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]
    whole = template._render(messages, tokenize=True, add_generation_prompt=True)
    ids = list(template.reply([answer]).token_ids)
    assert whole[-len(ids) :] == ids
    assert whole[-len(ids) - 1] in template.eos_ids


def test_calls_after_the_first_are_read_too():
    template, tokenizer = of(CHATML)
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
    two = one.replace("1", "2")
    _, calls = calls_in(template, tokenizer(f"Both.\n{one}\n{two}<|im_end|>")["input_ids"])
    assert [call.arguments["a"] for call in calls] == [1, 2]


UNSTABLE = CHATML.replace(
    "{% for m in messages %}", "{{ '<|im_start|>' ~ messages[-1].role ~ '<|im_end|>' }}{% for m in messages %}", 1
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (UNSTABLE, "not prefix-stable"),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "does not write tool calls"),
        (None, "tools need a chat template"),
    ],
    ids=["the start names the last role", "calls are left out", "there is none"],
)
def test_a_template_that_cannot_be_trained_with_is_refused_by_name(template, said):
    tokenizer = chat_tokenizer(template)
    with pytest.raises(ModelError, match=said):
        Template(tokenizer, [tokenizer.eos_token_id], {})


TRL = sorted(
    glob.glob(str(Path(__file__).parents[2] / ".venv-trl/lib/python*/site-packages/trl/chat_templates/*.jinja"))
)


TYPED = {"a": 7, "b": 'x, y\'s "z" {é}', "c": False, "d": [1, 2]}
ENDS = "<|im_end|> <|eot_id|> <|end|> <|call|> <|return|> <｜end▁of▁sentence｜> </s> <|observation|> <|user|> <turn|> <|tool_response>"
"""Tokens by which turns of the published templates end."""


def typed(a: int, b: str, c: bool, d: list[int]) -> int:
    """Arguments of four types.

    Args:
        a: A number.
        b: A text.
        c: A truth value.
        d: A list.
    """
    return a


@pytest.mark.nightly
@pytest.mark.skipif(not TRL, reason="needs TRL beside the project: make bench installs it")
def test_published_templates_are_learnt_or_refused():
    """Templates as their models publish them, which TRL ships: a call of four types is read back as it was written, or none can be."""
    (tool,), learnt, refused = tools_of([typed]), [], []
    for file in TRL:
        text = Path(file).read_text()
        words = set(
            re.findall(r"<\|[^|<>{}'\"\s]*\|>|<｜[^｜<>{}]*｜>|\[/?[A-Z_]+\]|</s>|<[a-z_]+\|>|<\|[a-z_]+>", text)
        )
        tokenizer = chat_tokenizer(text, tuple(sorted(words)))
        ends = [tokenizer.convert_tokens_to_ids(end) for end in ENDS.split() if end in words or end == "<|im_end|>"]
        try:
            template = Template(tokenizer, ends, {"tools": [tool.schema]})
        except ModelError as error:
            refused.append(str(error))
            continue
        arguments = json.dumps(TYPED) if template.takes_text_arguments else TYPED
        call = {
            "type": "function",
            "id": template.call_id("typed"),
            "function": {"name": "typed", "arguments": arguments},
        }
        ask = [{"role": "user", "content": "q"}]
        start = template._render(ask, tokenize=True, add_generation_prompt=True)
        whole = template._render([*ask, {"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=True)
        begin = next((i for i, (x, y) in enumerate(zip(start, whole, strict=False)) if x != y), len(start))
        _, calls = calls_in(template, whole[begin:])
        read = {name: typed_argument(value, tool.parameters.get(name)) for name, value in calls[0].arguments.items()}
        assert (len(calls), calls[0].name, read) == (1, "typed", TYPED), file
        learnt.append(Path(file).stem)
    families = "qwen2_5 qwen3 qwen3_5_think qwen3_8 llama3_1 glm4moe deepseekv3 gptoss gemma4 gemma4_v5 lfm2_2_5 nemotron_3_super muse_glimmer"
    assert set(families.split()) <= set(learnt)
    no_calls = re.compile("does not write tool calls|fails at a turn with a tool call")
    assert all(map(no_calls.search, refused))  # none writes calls that are not understood
