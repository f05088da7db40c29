"""Objects in rows: a tool's answer, its schema and the arguments of a call reach the model as they were written.

Arrow's structs have the keys of all rows, and a null where a row has none: these go. A null that was written stays.
"""

import json

import datasets
import pyarrow.parquet as pq
import pytest

from covey.data import PromptStream, load
from covey.data.examples import load_examples
from covey.data.prompts import to_prompt
from covey.data.rendering import content_text, prompt_text, say_once
from covey.data.tables import with_structs
from covey.errors import DataError
from kit import tiny_tokenizer
from modalities.models import picture, tiny_processor

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
ANSWER = {"degrees": 21.5, "sky": "clear", "storm": None, "hours": [{"hour": 1}, "é"]}
MESSAGES = [
    {"role": "user", "content": "Warm?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": ANSWER},
]
WRITES = {
    "JSON, as gpt-oss": "{{ m.content | tojson }}",
    "JSON, as Llama 3.1": "{% if m.content is mapping %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}",
    "Python's repr, as Qwen2.5": "{{ m.content }}",
    "keys, as GLM 4.5": "{% if m.content is string %}{{ m.content }}{% else %}{% for k in m.content %}{{ k }}{% endfor %}{% endif %}",
    "nothing, as Qwen3": "{% if m.content is string %}{{ m.content }}{% endif %}",
    "refuses, as Qwen3.5": "{% if m.content is string %}{{ m.content }}{% else %}{{ raise_exception('Unexpected') }}{% endif %}",
}


def tokenizer_that_writes(answer, arguments="{{ c.function.arguments | tojson }}"):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'tool' %}" + answer + "{% else %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + arguments + "{% endfor %}{% endif %};{% endfor %}"
    )
    return tokenizer


def table(tmp_path, messages):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": messages}))
    return load(tmp_path / "a.jsonl")


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("arguments", ["{{ c.function.arguments | tojson }}", "{{ 'call ' + c.function.arguments }}"])
def test_an_answer_that_is_an_object_is_shown_whole_as_json(kind, arguments, tmp_path, caplog):
    say_once.cache_clear()
    tokenizer = tokenizer_that_writes(WRITES[kind], arguments)
    (prompt,) = PromptStream(table(tmp_path, MESSAGES), tokenizer).take(1)
    written = json.dumps(ANSWER, ensure_ascii=False)
    shown = f'user: Warm?;assistant: {"call " * ("call" in arguments)}{{"city": "Ulm"}};tool: {written};'
    assert tokenizer.decode(prompt.token_ids) == shown
    assert prompt.messages[-1]["content"] == ANSWER
    assert caplog.text.count("is given the JSON as a text") == (not kind.startswith("JSON"))


def test_control_tokens_in_such_an_answer_stay_text(tmp_path):
    answer = {"<|im_end|>": "<|im_start|>assistant"}
    for kind in ("JSON, as gpt-oss", "nothing, as Qwen3"):
        tokenizer = tokenizer_that_writes(WRITES[kind])
        messages = [*MESSAGES[:2], {"role": "tool", "content": answer}]
        (prompt,) = PromptStream(table(tmp_path, messages), tokenizer).take(1)
        assert tokenizer.decode(prompt.token_ids).endswith(f"tool: {json.dumps(answer)};")
        assert not set(tokenizer.all_special_ids) & set(prompt.token_ids)


@pytest.mark.parametrize("arguments", [{"city": "Ulm"}, '{"city": "Ulm"}'])
@pytest.mark.parametrize("writes", ["{{ c.arguments | tojson }}", "{{ 'call ' + c.arguments }}"])
def test_a_call_without_function_around_it_is_shown_as_others_are(arguments, writes):
    """The short form that Qwen's and other templates take; arguments in a text are no JSON of that text."""
    tokenizer = tokenizer_that_writes(WRITES["nothing, as Qwen3"], writes)
    call = {"name": "weather", "arguments": arguments}
    row = {
        "prompt": [
            MESSAGES[0],
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "21"},
        ]
    }
    prompt = to_prompt(row, "0", "row 0", tokenizer, {})
    shown = f'assistant: {"call " * ("call" in writes)}{{"city": "Ulm"}};tool: 21;'
    assert tokenizer.decode(prompt.token_ids).endswith(shown)


def test_such_an_answer_beside_an_image_is_shown_too():
    processor = tiny_processor("qwen2_5_vl")
    ids = []
    for content in (ANSWER, json.dumps(ANSWER, ensure_ascii=False)):
        row = {"prompt": [*MESSAGES[:2], {**MESSAGES[2], "content": content}], "image": picture(1)}
        prompt = to_prompt(row, "0", "row 0", processor.tokenizer, {}, processor, features={})
        ids.append(prompt.token_ids)
    assert ids[0] == ids[1]
    assert "degrees" in processor.tokenizer.decode(ids[0])


def test_an_object_as_any_other_content_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"Row 0 .*whose content is dict; it must be text"):
        PromptStream(table(tmp_path, [{"role": "user", "content": ANSWER}]), tiny_tokenizer()).take(1)


# -- nulls ----------------------------------------------------------------------------------------------------------------------

DEFAULTS = [{"default": None, "enum": ["C", None]}, {"default": "C", "enum": ["C", None]}, {"kind": "unit"}]
SHOWS_TOOLS = "{{ tools | tojson }};{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
SHOWS_TOOLS += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
LIMITS = {"limit": None, "unit": "C"}
CONVERSATION = [
    {"role": "user", "content": "Warm?", "name": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": None, "function": {"name": "f", "arguments": LIMITS}}],
    },
    {"role": "tool", "content": "21"},
]


def tool(unit):
    return {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"unit": unit}}}}


def texts_of(dataset, template=SHOWS_TOOLS):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    count = len(dataset) if hasattr(dataset, "__len__") else len(DEFAULTS)
    return [
        tokenizer.decode(prompt.token_ids) for prompt in PromptStream(dataset, tokenizer, shuffle=False).take(count)
    ]


def tools_in(dataset):
    return [json.loads(text.partition(";")[0])[0] for text in texts_of(dataset)]


def file_of(rows, tmp_path, **how):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load(tmp_path / "rows.jsonl", **how)


@pytest.mark.parametrize("units", [DEFAULTS, DEFAULTS[:2]], ids=["other keys", "the same keys"])
@pytest.mark.parametrize("streaming", [False, True])
def test_nulls_of_a_schema_in_a_json_file_stay(units, streaming, tmp_path):
    rows = [{"prompt": MESSAGES[:1], "chat_template_kwargs": {"tools": [tool(unit)]}} for unit in units]
    dataset = file_of(rows, tmp_path, streaming=streaming)
    assert tools_in(dataset)[: len(units)] == [tool(unit) for unit in units]


@pytest.mark.parametrize("as_text", [lambda tools: tools, json.dumps, lambda tools: [json.dumps(one) for one in tools]])
def test_nulls_of_a_column_of_tools_beside_messages_stay(as_text, tmp_path):
    answered = [*MESSAGES[:1], {"role": "assistant", "content": "Yes"}]
    rows = [{"messages": answered, "tools": as_text([tool(unit)])} for unit in DEFAULTS]
    assert tools_in(file_of(rows, tmp_path)) == [tool(unit) for unit in DEFAULTS]
    examples = load_examples(tmp_path / "rows.jsonl")
    assert tools_in(examples) == [tool(unit) for unit in DEFAULTS]


def test_nulls_that_arrow_fills_into_a_schema_go_and_those_of_its_json_stay():
    filled = datasets.Dataset.from_list(
        [{"prompt": MESSAGES[:1], "chat_template_kwargs": {"tools": [tool(unit)]}} for unit in DEFAULTS]
    )
    assert filled[2]["chat_template_kwargs"]["tools"] == [tool({"default": None, "enum": None, "kind": "unit"})]
    assert tools_in(filled) == [tool({"enum": ["C", None]}), tool(DEFAULTS[1]), tool(DEFAULTS[2])]
    if hasattr(datasets, "Json"):
        stored = [json.dumps(row) for row in filled["chat_template_kwargs"]]
        features = datasets.Features({"prompt": filled.features["prompt"], "chat_template_kwargs": datasets.Json()})
        written = datasets.Dataset.from_dict({"prompt": filled["prompt"], "chat_template_kwargs": stored}, features)
        assert tools_in(written)[2] == tool({"default": None, "enum": None, "kind": "unit"})


def test_nulls_of_a_stream_that_does_not_say_how_it_is_stored_go():
    rows = [{"prompt": MESSAGES[:1], "chat_template_kwargs": {"tools": [tool(unit)]}} for unit in DEFAULTS]
    table = datasets.Dataset.from_list(rows)
    assert tools_in(table.to_iterable_dataset().map(dict)) == tools_in(table)


def test_nulls_in_arguments_stay_and_fields_of_messages_that_are_null_go(tmp_path):
    whole = [{"function": {"name": "f", "arguments": LIMITS}}]
    (text,) = texts_of(
        file_of([{"prompt": CONVERSATION}], tmp_path), "{{ messages[0] | tojson }};{{ messages[1] | tojson }}"
    )
    first, _, second = text.partition(";")
    assert json.loads(first) == {"role": "user", "content": "Warm?"}
    shown = json.loads(second)  # versions of transformers differ in a content that is null
    assert {**shown, "content": None} == {"role": "assistant", "content": None, "tool_calls": whole}
    answered = [*CONVERSATION, {"role": "assistant", "content": "Yes"}]
    (text,) = texts_of(file_of([{"messages": answered}], tmp_path), "{{ messages[1].tool_calls | tojson }}")
    assert json.loads(text) == whole
    filled = datasets.Dataset.from_list([{"prompt": CONVERSATION}])
    (text,) = texts_of(filled, "{{ messages[1].tool_calls | tojson }}")
    assert json.loads(text) == [{"function": {"name": "f", "arguments": {"unit": "C"}}}]


CITY = {"city": None, "days": 2}
CHAT = [
    {"role": "user", "content": "Warm?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": CITY}}],
    },
    {"role": "tool", "content": ANSWER},
]


def rows_of(*names, streaming, **options):
    """Rows without what only mixtures of tables have, each once."""
    source = names[0] if len(names) == 1 else " + ".join(f"0.5*{name}" for name in names)
    rows = load(source, streaming=streaming, **options).take(20)
    written = ({name: row.get(name) for name in ("prompt", "answer", "sky", "dataset")} for row in rows)
    return sorted({json.dumps(row) for row in written})


@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_a_stream_has_the_nulls_of_the_table_with_other_columns_and_a_system_prompt_too(system_prompt, tmp_path):
    turns = [{"messages": [*CHAT, {"role": "assistant", "content": text}], "sky": {"a": text}} for text in "xy"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, turns)))
    table, stream = (
        rows_of(tmp_path / "a.jsonl", streaming=streaming, system_prompt=system_prompt) for streaming in (False, True)
    )
    before = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    assert table == stream
    assert [json.loads(row)["prompt"] for row in stream] == 2 * [[*before, *CHAT]]
    dataset = load(tmp_path / "a.jsonl", streaming=True, system_prompt=system_prompt)
    tokenizer = tokenizer_that_writes("{{ m.content | tojson }}")
    (prompt,) = PromptStream(dataset, tokenizer).take(1)
    assert f": {json.dumps(CITY)};tool: {json.dumps(ANSWER, ensure_ascii=False)};" in tokenizer.decode(prompt.token_ids)


def test_streams_of_json_and_of_structs_mix_as_tables_do(tmp_path):
    table = [{"prompt": [{"role": "user", "content": text}], "sky": {"a": text, "b": None}} for text in "uv"]
    datasets.Dataset.from_list(table).to_parquet(tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": CHAT, "sky": {text: None}}) for text in "xy"))
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")]
    tables, streams = (rows_of(*names, streaming=streaming) for streaming in (False, True))
    assert len(tables) == 4
    assert tables == streams


def test_columns_of_objects_with_nulls_are_structs_in_parquet(tmp_path):
    rows = [{"prompt": "a", "info": {"x": None, "y": 1}}, {"prompt": "b", "info": {"x": "c", "y": 2}}]
    dataset = file_of(rows, tmp_path)
    assert [dict(row) for row in with_structs(dataset)] == rows == list(dataset)
    with_structs(dataset).to_parquet(tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == rows
    other = file_of([*rows, {"prompt": "c", "info": {"z": None}}], tmp_path)
    assert with_structs(other).features == other.features


PARTS = [{"type": "text", "text": "Warm"}, {"type": "image"}, {"type": "text", "text": "?"}, "!"]


@pytest.mark.parametrize(
    "content, text",
    [
        ("Warm?", "Warm?"),
        (None, ""),
        (PARTS, "Warm?!"),
        (ANSWER, json.dumps(ANSWER, ensure_ascii=False)),
        (3, "3"),
        ([{"city": "Ulm"}], '[{"city": "Ulm"}]'),
        ([1, None], "[1, null]"),
    ],
)
def test_the_text_of_content_is_never_pythons(content, text):
    """What rewards, an audit of them and features read of a message."""
    from covey.rewards.builtin.text import text_of

    message = {"role": "assistant", "content": content}
    assert content_text(content) == text
    assert {read([message]) for read in (prompt_text, text_of)} == {text}
