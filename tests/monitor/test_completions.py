"""`log_completions` shows a sample of what the model wrote, and nothing of it steers the terminal."""

import io
from dataclasses import replace

import pyarrow.parquet as pq
import torch

from covey.monitor.completions import completions_frame, rows, show_completions
from covey.runs import completions, rollouts
from kit import group


def two_groups():
    first = group(["4", "5"], question="2 + 2 =", rewards=[[1.0], [float("nan")]])
    second = group(["6", "7"], question="3 + 3 =", rewards=[[0.5], [0.0]])
    return [replace(first, advantages=torch.tensor([0.7, -0.7])), second]


def test_rows_take_groups_in_turn():
    assert rows(two_groups(), 1, None, False) == [
        ("2 + 2 =", "4", "1.00", "0.70"),
        ("3 + 3 =", "6", "0.50", "-"),
        ("2 + 2 =", "5", "-", "-0.70"),
        ("3 + 3 =", "7", "0.00", "-"),
    ]


def test_a_limit_keeps_the_first_rows():
    assert [row[1] for row in rows(two_groups(), 1, 3, False)] == ["4", "6", "5"]


def test_unique_prompts_are_shown_once():
    doubled = [*two_groups(), *two_groups()]
    assert [row[:2] for row in rows(doubled, 1, None, True)] == [("2 + 2 =", "4"), ("3 + 3 =", "6")]


def test_the_table_names_the_step_and_the_rewards_and_obeys_nothing():
    stream = io.StringIO()
    show_completions(7, [group(["\x1b[31m[bold]x[/bold]"], rewards=[[1.0]])], reward_names=["math"], stream=stream)
    shown = stream.getvalue()
    assert "completions of step 7" in shown
    assert "math" in shown
    assert "[bold]x[/bold]" in shown
    assert "\x1b" not in shown


def test_messages_are_shown_with_their_roles():
    chat = [{"role": "user", "content": "Hi"}]
    assert rows([group(["Hello"], question=chat)], 0, None, False) == [("user: Hi", "Hello", "-")]
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    chat = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": {"sky": "clear"}}]
    assert rows([group(["Blue"], question=chat)], 0, None, False)[0][0] == 'assistant: \ntool: {"sky": "clear"}'


def test_an_advantage_by_token_is_its_mean_over_the_tokens_alone():
    first = group(["a", "abcd"], rewards=[[1.0], [0.0]])
    lengths = [done.num_tokens for done in first.completions]
    assert lengths[0] < lengths[1]
    by_token = torch.zeros(2, max(lengths))
    by_token[0, : lengths[0]], by_token[1] = 1.0, -1.0
    first = replace(first, advantages=by_token)
    assert [row[-1] for row in rows([first], 1, None, False)] == ["1.00", "-1.00"]
    assert completions.table_of(1, [first], ["math"])["advantage"].to_pylist() == [1.0, -1.0]
    assert rollouts.table_of(1, [first], ["math"])["advantage"].to_pylist() == [1.0, -1.0]


def test_written_as_trl_writes_them(tmp_path):
    chat = [{"role": "user", "content": "Hi"}]
    first = group(["a", "b"], question=chat, rewards=[[1.0, float("nan")], [0.0, 2.0]])
    first = replace(first, advantages=torch.tensor([0.5, -0.5]), extras={"tries": [1, 2], "notes": [{"x": 1}, None]})
    completions.write(tmp_path / "completions", 3, [first], ["math", "style"])
    rows = pq.read_table(tmp_path / "completions" / "completions_00003.parquet").to_pylist()
    answer = [{"role": "assistant", "content": "a"}]
    assert rows[0] == {
        "step": 3, "prompt": chat, "completion": answer, "math": 1.0, "style": None, "notes": '{"x": 1}', "tries": 1, "advantage": 0.5,
    }  # fmt: skip
    assert [row["style"] for row in rows] == [None, 2.0]


def test_trackers_get_a_table_of_all_completions_or_of_one_for_each_prompt():
    groups = [*two_groups(), *two_groups()]
    frame = completions_frame(3, groups, ["math"], unique_prompts=False)
    assert list(frame.columns) == ["step", "prompt", "completion", "math", "advantage"]
    assert frame["completion"].tolist() == ["4", "5", "6", "7"] * 2
    assert frame["math"].tolist()[2:4] == [0.5, 0.0]
    assert completions_frame(3, groups, ["math"], unique_prompts=True)["completion"].tolist() == ["4", "6"]
    chat = group(["Hello"], question=[{"role": "user", "content": "Hi"}], rewards=[[0.25]])
    frame = completions_frame(3, [chat], ["math"], unique_prompts=True)
    assert (frame["prompt"].tolist(), frame["completion"].tolist()) == (["user: Hi"], ["assistant: Hello"])


def test_prompts_of_a_mixture_of_texts_and_chats_are_written_and_shown_to_trackers(tmp_path):
    chat = group(["Hello"], question=[{"role": "user", "content": "Hi"}], rewards=[[0.25]])
    groups = [group(["4"], question="2 + 2 =", rewards=[[1.0]]), chat]
    completions.write(tmp_path, 3, groups, ["math"])
    written = pq.read_table(tmp_path / "completions_00003.parquet").to_pydict()
    assert written["prompt"] == ['"2 + 2 ="', '[{"role": "user", "content": "Hi"}]']
    assert len(completions_frame(3, groups, ["math"], unique_prompts=True)) == 2
