"""Forms of today's families, by shape and in our own words: harmony, Kimi, GLM, Qwen 3.5, Mistral, DeepSeek, Gemma 4, Cohere and others.

Compared by hand with the published templates of these families: the words that mark a call are theirs.
"""

import re

import pytest

from covey.data.prompts import to_prompt
from covey.environments import Template, tools_of
from covey.environments.call_forms import WrittenCall
from covey.errors import ModelError
from environments.acting import CHATML, HARMONY, chat_tokenizer


def add(a: int, b: str) -> int:
    """Add.

    Args:
        a: The first.
        b: The second.
    """
    return a + len(b)


LAST = "{% set n = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
THOUGHT = "{% if m.reasoning_content and loop.index0 > n.last %}{{ m.reasoning_content }}{% endif %}"
PAIRS = "{% for k, v in c.function.arguments.items() %}"
TEXT = "{{ v if v is string else v | tojson }}"

KIMI = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|im_system|>{{ m.name }}<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GLM = (
    LAST + "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think>" + THOUGHT + "</think>"
    "{% if m.content %}\n{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n" + PAIRS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip
QWEN = (
    LAST + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > n.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n\n<tool_call>\n<function={{ c.function.name }}>\n" + PAIRS
    + "<parameter={{ k }}>\n" + TEXT + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)  # fmt: skip
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|></think>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% if loop.first %}<|calls|>{% endif %}<|call|>{{ c.function.name }}<|sep|>"
    "{{ c.function.arguments }}<|callend|>{% endfor %}<|end|>{% else %}<|outputs|>{{ m.content }}<|outputsend|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|></think>{% endif %}"
)
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|bot|>{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}<|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
"""A conversation whose calls are written as CALLS."""
EACH = "{% for c in m.tool_calls %}"
KEYED = (
    "{% for k, v in c.function.arguments.items() %}{{ k }}SEP"
    "{% if v is string %}QUOTE{{ v }}QUOTE{% else %}{{ v | tojson }}{% endif %}{% if not loop.last %}, {% endif %}{% endfor %}"
)
keyed = lambda separator, quote: KEYED.replace("SEP", separator).replace("QUOTE", quote)
GEMMA = CHAT.replace(
    "CALLS",
    EACH
    + "<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    + keyed(":", '<|"|>')
    + "{{ '}' }}<tool_call|>{% endfor %}",
)
PYTHON = (
    "{% for c in m.tool_calls %}{{ c.function.name }}("
    + keyed("=", "'")
    + "){% if not loop.last %}AND{% endif %}{% endfor %}"
)
LFM = CHAT.replace("CALLS", "<|tool_call_start|>[" + PYTHON.replace("AND", ", ") + "]<|tool_call_end|>")
LLAMA4 = CHAT.replace("CALLS", "[" + PYTHON.replace("AND", ", ").replace("'", '"') + "]")
OLMO = CHAT.replace("CALLS", "<function_calls>\n" + PYTHON.replace("AND", "\n") + "\n</function_calls>")
COHERE = CHAT.replace(
    "CALLS",
    "<|START_ACTION|>[\n{% for c in m.tool_calls %}"
    '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %},{% endif %}\n{% endfor %}]<|END_ACTION|>",
)
COMMAND_R = CHAT.replace(
    "CALLS",
    "Action: ```json\n[{% for c in m.tool_calls %}"
    '\n    {\n        "tool_name": "{{ c.function.name }}",\n        "parameters": {{ c.function.arguments | tojson }}\n    }'
    "{% if not loop.last %},{% endif %}{% endfor %}\n]```",
)
INVOKE = (
    '<invoke name="{{ c.function.name }}">\n'
    + PAIRS
    + '<parameter name="{{ k }}">'
    + TEXT
    + "</parameter>\n{% endfor %}</invoke>\n"
)
MINIMAX = CHAT.replace("CALLS", "\n<minimax:tool_call>\n" + EACH + INVOKE + "{% endfor %}</minimax:tool_call>")
DSML = CHAT.replace(
    "CALLS",
    "\n\n<｜DSML｜function_calls>\n" + EACH + '<｜DSML｜invoke name="{{ c.function.name }}">\n' + PAIRS
    + '<｜DSML｜parameter name="{{ k }}" string="{{ \'true\' if v is string else \'false\' }}">' + TEXT
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>",
)  # fmt: skip
KIMI3 = CHAT.replace(
    "CALLS",
    "<|open|>tools<|sep|>" + EACH + '<|open|>call tool="{{ c.function.name }}" index="{{ loop.index }}"<|sep|>' + PAIRS
    + '<|open|>argument key="{{ k }}" type="{{ \'string\' if v is string else \'number\' }}"<|sep|>' + TEXT
    + "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>",
)  # fmt: skip
GRANITE = CHAT.replace(
    "CALLS",
    EACH
    + '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
)
FAMILIES = {
    "Gemma 4": (GEMMA, ("<|end|>",), None),
    "LFM 2.5": (LFM, ("<|end|>",), None),
    "Llama 4": (LLAMA4, ("<|end|>",), None),
    "OLMo 3": (OLMO, ("<|end|>",), None),
    "Command A": (COHERE, ("<|end|>",), None),
    "Command R+": (COMMAND_R, ("<|end|>",), None),
    "MiniMax M2": (MINIMAX, ("<|end|>",), None),
    "DeepSeek V3.2": (DSML, ("<|end|>",), None),
    "Kimi K3": (KIMI3, ("<|end|>",), None),
    "Granite 4": (GRANITE, ("<|end|>",), None),
    "gpt-oss": (HARMONY, ("<|call|>", "<|return|>"), None),
    "Kimi K2": (KIMI, ("<|im_end|>",), "functions.add:3"),
    "GLM 4.6": (GLM, ("<|user|>", "<|observation|>"), None),
    "Qwen 3.5": (QWEN, ("<|im_end|>",), None),
    "Mistral": (MISTRAL, ("</s>",), "abcdefghi"),
    "DeepSeek": (DEEPSEEK, ("<|end|>",), None),
}


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
    text, calls = template.calls_in(turn(name, template, content, {"a": 7, "b": "x y"}))
    written = [(call.name, str(call.arguments["a"]), call.arguments["b"], call.problem, call.id) for call in calls]
    assert written == [("add", "7", "x y", None, FAMILIES[name][2])]
    assert text == ("" if name == "gpt-oss" else content)  # its words before a call are analysis


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_cites_that_identity_and_follows_the_turn_as_the_template_writes_it(name):
    template, tokenizer = of(name)
    identity = FAMILIES[name][2]
    answer = {"role": "tool", "name": "add", "content": "9"}
    ids = template.answer([answer], [WrittenCall("add", {"a": 7}, id=identity)], num_before=2)
    text = tokenizer.decode(ids)
    assert "9" in text
    if identity is not None:
        assert identity in text
    if name == "Kimi K2":  # without an identity, the next number of the conversation
        assert "functions.add:2" in tokenizer.decode(template.answer([answer], [WrittenCall("add", {})], num_before=2))
    if name == "Mistral":  # its template refuses an identity of four letters
        assert "call00001" in tokenizer.decode(
            template.answer([answer], [WrittenCall("add", {}, id="four")], num_before=0)
        )


def test_the_channels_of_harmony_are_told_apart():
    template, tokenizer = of("gpt-oss")
    read = lambda text: template.calls_in(tokenizer(text)["input_ids"])
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
    bridge = template.bridge([answer])
    assert whole[-len(bridge) :] == bridge
    completion = whole[len(prompt) : -len(bridge)]
    assert "I add." in tokenizer.decode(completion)
    _, calls = template.calls_in(completion)
    assert [call.name for call in calls] == ["add"]
    later = template._render([*ask, drawn, answer, {"role": "assistant", "content": "9"}, *ask], tokenize=True)
    assert "I add." not in tokenizer.decode(later)  # rendered again, the thought would be gone


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
