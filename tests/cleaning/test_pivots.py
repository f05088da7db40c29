"""`covey data pivots`: turns of expert trajectories as prompts."""

import json

import pytest

from covey.cli import main
from covey.data import load

CALL = [{"type": "function", "function": {"name": "look", "arguments": {"at": "b.py"}}}]
SOLVED = [
    {"role": "system", "content": "Mend it."},
    {"role": "user", "content": "It is broken."},
    {"role": "assistant", "content": "", "tool_calls": CALL},
    {"role": "tool", "content": "line 3"},
    {"role": "assistant", "content": "Mended line 3."},
]
FAILED = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5"}]


def file_of(folder, rows):
    path = folder / "expert.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def expert(tmp_path):
    return file_of(
        tmp_path,
        [{"messages": SOLVED, "solved": True, "repo": "a"}, {"messages": FAILED, "solved": False, "repo": "b"}],
    )


def made(expert, tmp_path, *options):
    target = tmp_path / "pivots.jsonl"
    assert main(["data", "pivots", expert, "-o", str(target), *options]) == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_each_turn_of_the_assistant_is_a_prompt_whose_answer_is_the_experts(expert, tmp_path, capsys):
    rows = made(expert, tmp_path)
    assert [(row["trajectory"], row["turn"], row["answer"]) for row in rows] == [
        (0, 2, ""),
        (0, 4, "Mended line 3."),
        (1, 1, "5"),
    ]
    assert rows[0]["prompt"] == SOLVED[:2]
    assert rows[1]["prompt"] == SOLVED[:4]
    assert json.loads(rows[0]["tool_calls"]) == CALL
    assert rows[1]["tool_calls"] == "[]"
    assert rows[2]["repo"] == "b"
    assert "3 pivots of 2 trajectories" in capsys.readouterr().out
    assert len(load(str(tmp_path / "pivots.jsonl"))) == 3


def test_calls_alone_and_successes_alone(expert, tmp_path, capsys):
    assert [
        row["turn"] for row in made(expert, tmp_path, "--tool-calls-only", "--success-column", "solved", "--json")
    ] == [2]
    assert json.loads(capsys.readouterr().out)["failed"] == 1


def test_sharegpts_form_a_system_column_and_tools_are_read(tmp_path):
    turns = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    (row,) = made(
        file_of(tmp_path, [{"conversations": json.dumps(turns), "system": "Add.", "tools": '[{"name": "add"}]'}]),
        tmp_path,
    )
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert (row["answer"], row["chat_template_kwargs"]) == ("4", {"tools": [{"name": "add"}]})


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{"text": "a"}], (), "Row 0 holds no list of messages with roles in one of the columns"),
        ([{"messages": "plain"}], (), "no list of messages"),
        ([{"messages": [{"content": "x"}]}], (), "no list of messages"),
        ([{"messages": FAILED}], ("--tool-calls-only",), "no turn of the assistant with tool calls"),
        ([{"messages": FAILED}], ("--success-column", "won"), "Row 0 has no column 'won'"),
        ([{"messages": FAILED}], ("--messages-column", "chat"), "in the column 'chat'"),
    ],
)
def test_what_is_no_trajectory_is_refused_and_leaves_no_file(rows, options, said, tmp_path, capsys):
    target = tmp_path / "pivots.jsonl"
    assert main(["data", "pivots", file_of(tmp_path, rows), "-o", str(target), *options]) != 0
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["expert.jsonl"]


def test_nothing_is_overwritten(expert, tmp_path, capsys):
    made(expert, tmp_path)
    assert main(["data", "pivots", expert, "-o", str(tmp_path / "pivots.jsonl")]) != 0
    assert "is there already" in capsys.readouterr().err
    assert main(["data", "pivots", expert, "-o", str(tmp_path / "pivots.txt")]) != 0
