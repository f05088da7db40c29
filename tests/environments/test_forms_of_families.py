"""Forms of today's families, by shape and in our own words: harmony, Kimi, GLM, Qwen 3.5, Mistral, DeepSeek, Gemma 4, Cohere and others.

Compared by hand with the published templates of these families: the words that mark a call are theirs.
"""

import re

import pytest

from covey.data.prompts import to_prompt
from covey.environments import Template, tools_of
from covey.environments.call_forms import WrittenCall, _JsonCalls, as_mapping, typed_argument
from covey.environments.calls import Request, ToolRunner
from covey.environments.keyed_calls import _KeyedCalls
from covey.errors import ModelError
from environments.acting import CHATML, calls_in, chat_tokenizer
from environments.families import CHAT, EACH, FAMILIES, MUSE, UNMARKED
from kit import rest_nightly


def add(a: int, b: str) -> int:
    """Add.

    Args:
        a: The first.
        b: The second.
    """
    return a + len(b)


def of(name, **options):
    text, ends, _ = FAMILIES[name]
    words = {*re.findall(r"<\|[^|<>{}']+\|>|\[/?[A-Z_]+\]|</s>|</?think>", text), *ends}
    tokenizer = chat_tokenizer(text, tuple(sorted(words)), eos=ends[0])
    ids = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    schemas = [each.schema for each in tools_of([add])]
    return Template(tokenizer, ids, {"tools": schemas, **options}), tokenizer


def turn(name, template, content, arguments):
    """Token ids of a turn with one call, as the template writes it after the prompt."""
    held = template.takes_text_arguments
    call = {"function": {"name": "add", "arguments": '{"a": 7, "b": "x y"}' if held else arguments}}
    call |= {"type": "function", "id": FAMILIES[name][2] or "abcdefghi"}
    ask = [{"role": "user", "content": "q"}]
    start = template._render(ask, tokenize=True, add_generation_prompt=True)
    whole = template._render([*ask, {"role": "assistant", "content": content, "tool_calls": [call]}], tokenize=True)
    shared = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
    return whole[shared:]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("content", ["", "Let me see."])
def test_a_call_is_read_with_the_identity_that_the_model_wrote(name, content):
    if content and name == "Llama 4":
        pytest.skip("its calls are whole turns")
    template, _ = of(name)
    text, calls = calls_in(template, turn(name, template, content, {"a": 7, "b": "x y"}))
    written = [(call.name, str(call.arguments["a"]), call.arguments["b"], call.problem, call.id) for call in calls]
    assert written == [("add", "7", "x y", None, FAMILIES[name][2])]
    assert text == ("" if name == "gpt-oss" else content)  # its words before a call are analysis


@pytest.mark.parametrize("mark", ["", ">>>"])
def test_what_a_turn_writes_to_all_is_its_text_and_no_call(mark, monkeypatch):
    monkeypatch.setitem(FAMILIES, "here", (UNMARKED if mark else FAMILIES["Functionary 3"][0], ("<|end|>",), None))
    template, tokenizer = of("here")
    read = lambda text: calls_in(template, tokenizer(mark + text + "<|end|>")["input_ids"])
    assert read('all\nThe answer is {"a": 4}.') == ('The answer is {"a": 4}.', [])
    assert read("Not in this form.") == (mark + "Not in this form.", [])
    call = WrittenCall("add", {"a": 7})
    assert read('all\nI add.>>>add\n{"a": 7}>>>add\n{"a": 7}') == ("I add.", [call, call])
    assert "no JSON" in read('add\n{"a": 7')[1][0].problem
    answer, calls = read("Yes\nIt is 4.")
    if mark:  # the model wrote the mark itself
        assert "no JSON" in calls[0].problem
    else:  # of a prompt that ends with it, the first line may be an answer's
        assert (answer, calls) == ("Yes\nIt is 4.", [])


def test_a_form_in_which_any_word_would_be_a_call_is_refused(monkeypatch):
    bare = CHAT.replace("CALLS", EACH + "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}")
    monkeypatch.setitem(FAMILIES, "here", (bare, ("<|end|>",), None))
    with pytest.raises(ModelError, match="a form that is not understood"):
        of("here")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_cites_that_identity_and_follows_the_turn_as_the_template_writes_it(name):
    template, tokenizer = of(name)
    identity = FAMILIES[name][2]
    answer = {"role": "tool", "name": "add", "content": "9"}
    ids = template.answer([answer], [WrittenCall("add", {"a": 7}, id=identity)], num_before=2).token_ids
    text = tokenizer.decode(ids)
    assert "9" in text
    if identity is not None:
        assert identity in text
    if name == "Kimi K2":  # without an identity, the next number of the conversation
        assert "functions.add:2" in tokenizer.decode(
            template.answer([answer], [WrittenCall("add", {})], num_before=2).token_ids
        )
    if name == "Mistral":  # its template refuses an identity of four letters
        assert "call00001" in tokenizer.decode(
            template.answer([answer], [WrittenCall("add", {}, id="four")], num_before=0).token_ids
        )


TEXTS = (
    "", " ", "7", "null", "\nfirst", "last\n", "  in  ", "日本 é", 'a "b"', "it's", "back\\slash", "\\n", "{", "[1, 2]", "a, b=c", "a < b > c",
    "</tool_call>", "<tool_call>", "</parameter>", "</arg_value>", "<function=x>", "</think>", "functions.add:1", "\u2028", "&amp;",
)  # fmt: skip
VALUES = (
    [],
    ["\n", "a'b"],
    [{"x y": "</tool_call>"}, 1, True],
    {},
    {"x y": {"é": ["\\n"]}, "k": 7},
    {"k": [1], "a b": "c"},
)


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        [name for name in FAMILIES if name not in ("gpt-oss", "DeepSeek")],
        ["Qwen 3.5", "DeepSeek V3.2", "Kimi K3", "GLM 4.6", "MiniMax M2", "Gemma 4"],
    ),
)
def test_texts_that_look_like_parts_of_a_call_lists_and_objects_are_read_back(name):
    """Of two calls in one turn, behind thoughts and a text."""
    template, _ = of(name)
    for value in (*TEXTS, *VALUES):
        made = [{"a": 7, "b": value}, {"b": value}, {"a": 1, "b": "x"}]
        calls = [
            {"type": "function", "id": FAMILIES[name][2] or "abcdefghi", "function": {"name": "add", "arguments": each}}
            for each in made
        ]
        ask = [{"role": "user", "content": "q"}]
        start = template._render(ask, tokenize=True, add_generation_prompt=True)
        drawn = {"role": "assistant", "content": "" if name == "Llama 4" else "Now.", "tool_calls": calls}
        whole = template._render([*ask, drawn], tokenize=True)
        shared = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
        _, read, _ = template.turn_in(whole[shared:], start)
        typed = lambda given: {"a": typed_argument(given["a"], {"type": "integer"})} if "a" in given else {}
        kinds = {"anyOf": [{"type": "array"}, {"type": "object"}]} if not isinstance(value, str) else {"type": "string"}
        back = [{**typed(each.arguments), "b": each.arguments["b"]} for each in read]
        back = [each | {"b": typed_argument(each["b"], kinds if i < 2 else None)} for i, each in enumerate(back)]
        assert back == made, value


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"oneOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("7", {"type": ["string", "null"]}, "7"),
        ("true", {"type": ["string", "integer"]}, "true"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"const": 2}, 2),
        ("2", {}, "2"),
        ("2", None, "2"),
        ("2", {"enum": ["2", 3]}, "2"),
        ("2", {"type": None}, "2"),
        ("2", {"type": "integer", "enum": None, "anyOf": None}, 2),
        ("2", {"enum": 2}, "2"),
        ("2", True, "2"),
    ],
)
def test_text_becomes_a_value_of_the_types_that_a_schema_admits(text, schema, value):
    assert typed_argument(text, schema) == value
    assert type(typed_argument(text, schema)) is type(value)


def test_the_channels_of_harmony_are_told_apart():
    template, tokenizer = of("gpt-oss")
    read = lambda text: calls_in(template, tokenizer(text)["input_ids"])
    thought = "<|channel|>analysis<|message|>Seven.<|end|><|start|>assistant"
    assert read(f"{thought}<|channel|>final<|message|>It is 7.<|return|>") == ("It is 7.", [])
    text, calls = read(f"{thought}<|channel|>commentary to=functions.add <|message|>" + '{"a": 1, "b": "x"}<|call|>')
    assert (text, [(call.name, call.arguments) for call in calls]) == ("", [("add", {"a": 1, "b": "x"})])
    text, calls = read(
        f"{thought}<|channel|>commentary<|message|>I add.<|end|><|start|>assistant to=functions.add<|channel|>commentary<|message|>"
        + "{a<|call|>"
    )
    assert text == "I add."
    assert "no JSON" in calls[0].problem
    assert read("It is 7.<|return|>") == ("It is 7.", [])


@pytest.mark.parametrize("name", ["Qwen 3.5", "GLM 4.6"])
def test_thoughts_that_the_template_drops_later_stay_in_the_tokens_that_are_learnt(name):
    """Prompt, drawn turn with thoughts, answer, next turn: a prefix of each other, and as the template writes it now."""
    template, tokenizer = of(name)
    ask = [{"role": "user", "content": "q"}]
    prompt = template._render(ask, tokenize=True, add_generation_prompt=True)
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 7, "b": "x"}}}
    drawn = {"role": "assistant", "content": "Now.", "reasoning_content": "I add.", "tool_calls": [call]}
    answer = {"role": "tool", "name": "add", "content": "9", "tool_call_id": "abcdefghi"}
    whole = template._render([*ask, drawn, answer], tokenize=True, add_generation_prompt=True)
    assert whole[: len(prompt)] == prompt
    bridge = list(template.reply([answer]).token_ids)
    assert whole[-len(bridge) :] == bridge
    completion = whole[len(prompt) : -len(bridge)]
    assert "I add." in tokenizer.decode(completion)
    _, calls = calls_in(template, completion)
    assert [call.name for call in calls] == ["add"]
    later = template._render([*ask, drawn, answer, {"role": "assistant", "content": "9"}, *ask], tokenize=True)
    assert "I add." not in tokenizer.decode(later)  # rendered again, the thought would be gone


def test_a_channel_of_thoughts_is_no_call():
    """Where the channel of a call names the tool as well, thoughts to another name are none."""
    tokenizer = chat_tokenizer(MUSE, ("<|start|>", "<|message|>", "<|eom|>", "<|end|>"), eos="<|end|>")
    template = Template(tokenizer, [tokenizer.eos_token_id], {})
    turn = " to=self<|message|>I add.<|eom|><|start|>assistant to=add<|message|><calls>\n"
    turn += '<invoke name="add">\n<parameter name="a">7</parameter>\n</invoke>\n</calls><|end|>'
    _, calls = calls_in(template, tokenizer(turn, add_special_tokens=False)["input_ids"])
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": "7"})]


def test_an_object_behind_a_call_is_a_call_only_with_a_name():
    template, tokenizer = of("MiniMax M1")
    read = lambda text: calls_in(template, tokenizer(text)["input_ids"])
    first = '{"name": "add", "arguments": {"a": 1}}'
    _, calls = read(f"<tool_calls>\n{first}\n" + '{"name": "add", "arg\n</tool_calls>')
    assert [(call.name, call.problem is None) for call in calls] == [("add", True), ("", False)]
    text, calls = read(f"<tool_calls>\n{first}" + '{"a": 1}</tool_calls>')
    assert [call.name for call in calls] == ["add"]
    assert '{"a": 1}' in text
    open_ended = _JsonCalls("CALL", "", "name", "arguments", None)
    text, calls = open_ended(f"CALL{first} {{a}} is a set.")
    assert (text, len(calls)) == ("{a} is a set.", 1)


def test_a_template_that_fails_at_a_call_is_refused_with_its_own_words():
    """As Kimi K2 Thinking's, which changes a list: transformers renders templates where nothing may be changed."""
    text = CHATML.replace("{% for call in", "{% set _ = [].append(1) %}{% for call in", 1)
    assert text != CHATML
    tokenizer = chat_tokenizer(text)
    with pytest.raises(
        ModelError, match=r"fails at a turn with a tool call \(SecurityError: .*append.*set tokenizer\.chat_template"
    ):
        Template(tokenizer, [tokenizer.eos_token_id], {})


def test_a_form_that_is_not_understood_is_shown_with_what_to_set():
    text = CHATML.replace('{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
                          "{{ call.function.name }}({% for k, v in call.function.arguments.items() %}{{ k }} is ~{{ v }}~{% endfor %})")  # fmt: skip
    tokenizer = chat_tokenizer(text)
    with pytest.raises(
        ModelError, match=r"not understood, such as '.*qxname\(qxkeya is ~qxvaluea~.*set tokenizer.response_template"
    ) as error:
        Template(tokenizer, [tokenizer.eos_token_id], {})
    assert "\n" not in str(error.value)


def test_reasoning_effort_reaches_the_template_from_the_run_and_from_the_row():
    _, tokenizer = of("gpt-oss")
    ids = lambda row, template: (
        to_prompt({"prompt": [{"role": "user", "content": "q"}], **row}, "0", "row 0", tokenizer, template).token_ids
    )
    read = lambda *given: tokenizer.decode(ids(*given))
    assert "Reasoning: medium" in read({}, {})
    assert "Reasoning: high" in read({}, {"reasoning_effort": "high"})
    assert "Reasoning: low" in read({"chat_template_kwargs": {"reasoning_effort": "low"}}, {"reasoning_effort": "high"})


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_as_json_and_null_keys_of_tables_are_the_same_prompt(name):
    """Arrow gives each call the keys of all calls, null where it has none; OpenAI's form has arguments as JSON in a text."""
    _, tokenizer = of(name)

    def ids(arguments, **more):
        call = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "add", "arguments": arguments, **more},
            **more,
        }
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "9", "tool_call_id": "abcdefghi", "tool_calls": None},
        ]
        return to_prompt({"prompt": messages}, "0", "row 0", tokenizer, {}).token_ids

    plain = ids({"a": 7, "b": "é"})
    assert ids('{"a": 7, "b": "é"}') == plain
    assert ids({"a": 7, "b": "é", "of_another_row": None}, of_others=None) == plain
    assert "'a'" not in tokenizer.decode(plain)  # no dict of Python


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 70 + "]" * 70])
def test_a_call_that_is_nested_too_deep_is_to_be_written_again(arguments):
    form = _JsonCalls("CALL", "END", "name", "arguments", None)
    _, (call, other) = form(
        f'CALL{{"name": "add", "arguments": {arguments}}}ENDCALL{{"name": "add", "arguments": {{"a": 1}}}}END'
    )
    assert re.search(r"(nested more than 60 deep|recursion depth exceeded.*)\); write it again", call.problem)
    assert (other.arguments, other.problem) == ({"a": 1}, None)
    assert as_mapping(arguments) == arguments
    assert as_mapping('{"a": "\ud83d"}') == {"a": "\ufffd"}


@pytest.mark.parametrize("written", ['{1: 2, "a": 3}', "{(1, 2): 3}", '{{"a": 1}}', "[" * 70 + "]" * 70])
def test_a_literal_of_python_that_json_cannot_hold_ends_no_run(written):
    """Metrics and records of a run write arguments as JSON, keys in order."""
    assert typed_argument(written, {"type": "object"}) == written
    _, (call,) = _KeyedCalls("CALL", "(", '"')(f"CALLadd(a={written})")
    assert "write it again" in call.problem
    assert typed_argument(r'[("\ud83d", 1)]', {"type": "array"}) == [("\ufffd", 1)]
    assert typed_argument("{1: 2}", {"type": "object"}) == {1: 2}


def test_half_of_a_character_in_a_call_or_an_answer_ends_no_run():
    template, _ = of("Qwen 3.5")
    _, (call,) = _JsonCalls("CALL", "", "name", "arguments", None)(r'CALL{"name": "say", "arguments": {"a": "\ud83d"}}')
    assert call.arguments == {"a": "\ufffd"}

    def say(a: str) -> str:
        """Say.

        Args:
            a: The text.
        """
        if a == "raise":
            raise ValueError(f"{a} \udcff")
        return f"{a} \udcff"

    runner = ToolRunner()
    for text, said in (("hi", "hi \ufffd"), ("raise", '{"error": "ValueError: raise \ufffd"}')):
        (done,) = runner.run([Request("say", {"a": text}, {tool.name: tool for tool in tools_of([say])})])
        assert done.result == said
        assert template.answer([{"role": "tool", "name": "say", "content": done.result}], [call], 0).token_ids
    runner.close()
