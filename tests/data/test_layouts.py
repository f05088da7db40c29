"""Public layouts of data sets: the question is the prompt, the answer is a column, and no answer gets into a prompt."""

from __future__ import annotations

import json
import logging
import math

import datasets
import pytest

from covey.data import PromptStream, layouts, load, prompts
from covey.data.examples import load_examples
from covey.data.rendering import say_once
from covey.errors import DataError, MissingKeyError
from kit import forgotten, tiny_tokenizer

USER, SYSTEM = {"role": "user", "content": "1+1?"}, {"role": "system", "content": "Be short."}
ASSISTANT = {"role": "assistant", "content": "It is 2."}
CALL = {
    "role": "assistant", "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "1"}'}}],
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "c", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with forgotten(say_once):
        yield


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("covey.data")]


LAYOUTS = {
    "sharegpt": (
        {"id": "7", "conversations": [{"from": "system", "value": "Be short."}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "It is 2."}]},
        [SYSTEM, USER], "It is 2.",
    ),
    "sharegpt with a system column": (
        {"system": "Be short.", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "It is 2."}]},
        [SYSTEM, USER], "It is 2.",
    ),
    "sharegpt of two turns": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi!"}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi!"}, USER], "2",
    ),
    "openai": ({"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER], "It is 2."),
    "openai in parts": (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "2."}]}]}, [USER], "It is 2.",
    ),
    "openai with tools": ({"messages": [USER, CALL, RESULT, ASSISTANT], "tools": TOOLS}, [USER, CALL, RESULT], "It is 2."),
    "conversations by role": ({"conversations": [USER, ASSISTANT]}, [USER], "It is 2."),
    "messages without an answer": ({"messages": [SYSTEM, USER]}, [SYSTEM, USER], None),
    "alpaca": ({"instruction": "Add.", "input": "1 and 1", "output": "2"}, "Add.\n\n1 and 1", "2"),
    "alpaca without input": ({"instruction": "1+1?", "input": "", "output": "2"}, "1+1?", "2"),
    "open-r1": ({"problem": "1+1?", "solution": "It is 2.", "answer": "2", "generations": ["x"], "messages": [USER, ASSISTANT]}, "1+1?", "2"),
    "verl": (
        {"data_source": "gsm8k", "prompt": [USER], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "007"}, "extra_info": {"index": 1}},
        [USER], "007",
    ),
}  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_known_layout_gives_prompts_and_answers(tmp_path, layout, streaming, caplog):
    row, prompt, answer = LAYOUTS[layout]
    loaded = load(written(tmp_path / "a.jsonl", [row, row]), streaming=streaming)
    for found in loaded:
        messages = found["prompt"]
        assert (messages if isinstance(messages, str) else [prompts.clean(one) for one in messages]) == prompt
        assert found["answer"] == answer
    assert len(said(caplog)) == 1, "once, whatever the number of rows"
    assert "answer" not in json.dumps(prompt)


def test_the_layout_of_verl_is_read_from_parquet(tmp_path):
    row, prompt, answer = LAYOUTS["verl"]
    datasets.Dataset.from_list([row, row]).to_parquet(str(tmp_path / "a.parquet"))
    loaded = load(tmp_path / "a.parquet")
    assert (loaded[1]["prompt"], loaded[1]["answer"]) == (prompt, answer)


def test_numbers_of_a_csv_file_are_texts_of_its_prompts(tmp_path):
    path = tmp_path / "sums.csv"
    path.write_text("instruction,input,output\n12,3.5,15.5\n4,,4\n")
    assert list(load(str(path))["prompt"]) == ["12\n\n3.5", "4"]
    row = {"instruction": "Say hi.", "input": math.nan, "output": "hi"}  # pandas' missing value
    assert layouts.with_prompts(datasets.Dataset.from_list([row]), "rows", {})[0]["prompt"] == "Say hi."
    with pytest.raises(DataError, match="where the text of its prompt belongs"):
        load(str(written(tmp_path / "odd.jsonl", [{"instruction": ["a"], "output": "b"}])))


def test_the_layout_of_apps_keeps_its_tests_and_shows_the_starter_code(tmp_path):
    row = {
        "problem_id": 1,
        "question": "Add one.",
        "solutions": "[]",
        "input_output": '{"inputs": ["1"]}',
        "starter_code": "def f(x):",
    }
    loaded = load(written(tmp_path / "a.jsonl", [row]))
    assert loaded[0]["prompt"] == "Add one.\n\ndef f(x):"
    assert loaded[0]["input_output"] == row["input_output"]


def test_the_tools_of_a_log_reach_the_chat_template(tmp_path):
    loaded = load(written(tmp_path / "a.jsonl", [{"messages": [USER, ASSISTANT], "tools": json.dumps(TOOLS)}]))
    assert loaded[0]["chat_template_kwargs"] == {"tools": TOOLS}


@pytest.mark.parametrize("tools", ["search, sum", ["search"], 3, json.dumps(TOOLS[0]), json.dumps(["search"])])
def test_a_column_that_only_has_the_name_of_tools_is_refused(tools):
    row = {"messages": [USER, ASSISTANT], "tools": tools}
    with pytest.raises(DataError, match=r"in its column 'tools'; give a list of functions as JSON schemas"):
        load_examples(datasets.Dataset.from_list([row]))
    in_parts = load_examples(datasets.Dataset.from_list([row | {"tools": [json.dumps(tool) for tool in TOOLS]}]))
    assert in_parts[0]["chat_template_kwargs"] == {"tools": TOOLS}


def test_the_columns_that_a_user_names_are_the_users(tmp_path, caplog):
    row = {"instruction": "Add.", "output": "2", "messages": [USER, ASSISTANT]}
    loaded = load(written(tmp_path / "a.jsonl", [row]), prompt_column="instruction", columns={"gold": "output"})
    assert loaded[0] == {"prompt": "Add.", "gold": "2", "messages": [USER, ASSISTANT]}
    assert not said(caplog)
    verl = LAYOUTS["verl"][0]
    loaded = load(written(tmp_path / "b.jsonl", [verl]), columns={"answer": "ability"})
    assert loaded[0]["answer"] == "math"


def test_a_named_column_of_sharegpt_is_parted_too(tmp_path):
    loaded = load(written(tmp_path / "a.jsonl", [LAYOUTS["sharegpt"][0]]), prompt_column="conversations")
    assert (loaded[0]["prompt"], loaded[0]["answer"]) == ([SYSTEM, USER], "It is 2.")


def test_prompts_that_end_with_the_assistant_are_said_once(caplog):
    caplog.set_level(logging.WARNING)
    dataset = datasets.Dataset.from_list([{"prompt": [USER, ASSISTANT]}] * 3)
    PromptStream(dataset, tiny_tokenizer(), seed=0).take(3)
    assert [line for line in said(caplog) if "end with a message of the assistant" in line] == said(caplog)
    assert len(said(caplog)) == 1


@pytest.mark.parametrize(
    ("row", "option"),
    [
        ({"id": "1", "question": "a", "answer": "b"}, "--prompt-column question"),
        ({"id": "1", "gold": "b", "user_query": "a"}, "--prompt-column user_query"),
        ({"id": "1", "answer": "b", "x": "a"}, "--prompt-column COLUMN"),
    ],
)
def test_a_layout_that_is_not_certain_is_refused_with_the_option(tmp_path, row, option):
    with pytest.raises(MissingKeyError, match=option):
        load(written(tmp_path / "a.jsonl", [row]))


def test_a_role_that_nobody_knows_is_named_with_its_row(tmp_path):
    rows = [{"conversations": [{"from": "human", "value": "a"}]}, {"conversations": [{"from": "alien", "value": "a"}]}]
    with pytest.raises(DataError, match="Row 1 .* the role 'alien'"):
        load(written(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize("layout", ["sharegpt", "alpaca"])
def test_examples_for_supervised_training_are_read_from_the_same_layouts(tmp_path, layout):
    row, prompt, answer = LAYOUTS[layout]
    found = load_examples(str(written(tmp_path / "a.jsonl", [row])))
    assert (found[0]["prompt"], found[0]["completion"]) == (prompt, answer)
