"""What a step wrote is one row a completion, readable by other tools, whole or absent; its text is safe on a terminal."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.process.terminal import safe
from covey.runs import completions, rollouts
from covey.types import Completion, Group, Prompt
from example_counts import examples
from kit import group


def completion(text: str, tokens: list[int], **known: object) -> Completion:
    return Completion(token_ids=torch.tensor(tokens), text=text, finish="stop", **known)  # type: ignore[arg-type]


def two_groups() -> list[Group]:
    first = Group(
        prompt=Prompt(uid="0:3", token_ids=(1,), text="2 + 2 =", columns={"answer": "4", "tags": ["a"]}),
        completions=(
            completion(
                "4", [7, 2], logprobs=torch.tensor([-0.5, -0.25]), ref_logp=torch.tensor([-1.0, -2.0]), version=9
            ),
            completion("five\x1b[31m", [8], logprobs=torch.tensor([-0.75])),
        ),
        rewards=torch.tensor([[1.0, 0.5], [math.nan, 0.25]]),
        advantages=torch.tensor([0.5, -0.5]),
        extras={"length": [1, 2], "note": ["ok", {"a": 1}]},
    )
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    )
    second = Group(
        prompt=Prompt(uid="0:4", token_ids=(1,), messages=messages),
        completions=(completion("\ud800 lone", [], mask=torch.zeros(0, dtype=torch.bool)),),
        rewards=torch.tensor([[math.nan, math.nan]]),
        advantages=torch.tensor([0.0]),
    )
    return [first, second]


def test_a_row_holds_everything_about_a_completion(tmp_path: Path) -> None:
    path = rollouts.write(tmp_path / "rollouts", 10, two_groups(), ["match", "brief"], weights=[1.0, 2.0])
    assert path.name == "step-000010.parquet"
    first, second, third = rollouts.read(path)
    assert first["step"] == 10
    assert (first["prompt_uid"], first["group"], first["completion_index"], first["version"]) == ("0:3", 0, 0, 9)
    assert (first["prompt"], first["completion"], first["finish"]) == ("2 + 2 =", "4", "stop")
    assert (first["reward"], first["reward/match"], first["reward/brief"]) == (2.0, 1.0, 0.5)
    assert (first["token_ids"], first["logprobs"], first["ref_logp"]) == ([7, 2], [-0.5, -0.25], [-1.0, -2.0])
    assert json.loads(first["columns"]) == {"answer": "4", "tags": ["a"]}
    assert (first["extra/length"], first["extra/note"], second["extra/note"]) == (1.0, "ok", '{"a": 1}')
    assert (second["completion"], second["advantage"]) == ("five\x1b[31m", -0.5)  # data is kept as it was written
    assert (second["reward/match"], second["reward"], second["ref_logp"]) == (None, 0.5, None)
    assert (third["reward"], third["token_ids"], third["extra/length"]) == (None, [], None)
    assert third["prompt"] == "system: Be brief.\nuser: hi"
    assert third["completion"] == "\\ud800 lone"
    assert "old_logp" not in first  # nobody measured it


def test_other_tools_read_it(tmp_path: Path) -> None:
    path = rollouts.write(tmp_path, 1, two_groups(), ["match", "brief"])
    schema = pq.read_schema(path)
    assert str(schema.field("logprobs").type) in ("list<element: float>", "list<item: float>")
    assert str(schema.field("reward/match").type) == "double"
    frame = pq.read_table(path).to_pandas() if _has_pandas() else None
    assert frame is None or frame["reward"].tolist()[:2] == [1.5, 0.25]


def _has_pandas() -> bool:
    try:
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


def test_advantages_by_token_and_further_columns_by_token(tmp_path: Path) -> None:
    group = two_groups()[0]
    by_token = Group(
        prompt=group.prompt,
        completions=group.completions,
        rewards=group.rewards,
        advantages=torch.tensor([[1.0, 2.0], [3.0, 99.0]]),
    )
    entropy = torch.tensor([[0.1, 0.2], [0.3, 0.0]], dtype=torch.float64)
    path = rollouts.write(tmp_path, 1, [by_token], ["a", "a"], per_token={"entropy": [entropy]})
    first, second = rollouts.read(path)
    assert (first["advantages"], first["advantage"]) == ([1.0, 2.0], 1.5)
    assert (second["advantages"], second["advantage"]) == ([3.0], 3.0)  # beyond its end there is nothing
    assert second["token/entropy"] == [pytest.approx(0.3)]
    assert (first["reward/a"], first["reward/a#1"]) == (1.0, 0.5)


def test_groups_that_nobody_scored_yet_can_be_written(tmp_path: Path) -> None:
    group = Group(prompt=Prompt(uid="0", token_ids=()), completions=(completion("x", [1]),))
    (row,) = rollouts.read(rollouts.write(tmp_path, 1, [group], ["match"]))
    assert (row["reward"], row["reward/match"], "advantage" in row) == (None, None, False)
    assert rollouts.read(rollouts.write(tmp_path, 2, [], ["match"])) == []


def test_the_same_step_again_replaces_its_file_and_later_ones_go_on_resume(tmp_path: Path) -> None:
    assert rollouts.steps(tmp_path / "none") == []
    for step in (1, 5, 5, 10):
        rollouts.write(tmp_path, step, two_groups(), ["match", "brief"])
    (tmp_path / "notes.txt").touch()
    assert rollouts.steps(tmp_path) == [1, 5, 10]
    rollouts.truncate_to(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("notes.txt", "step-000001.parquet", "step-000005.parquet")
    ]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain\nlines\tand größe 漢字 😀", "plain\nlines\tand größe 漢字 😀"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]52;c;cm0gLXJm\x1b\\x", "x"),
        ("\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "click"),
        ("\x9b31mred", "red"),
        ("\x1bPq#0\x1b\\x", "x"),
        ("\x1b(0x\x1b7", "x"),
        ("cut \x1b[3", "cut 3"),
        ("\x1b]0;never ended hides nothing", "0;never ended hides nothing"),
        ("\x1b]" * 20_000 + "\x9d" * 20_000 + "end", "�" * 20_000 + "end"),
        ("a\x00b\rc\x08d\x7f\x85", "a␀b␍c␈d␡�"),
        ("abc\u202egnp.exe", "abc�gnp.exe"),
        ("\u2066\u2069\u200f\u2028", "����"),
        ("\ud800", "�"),
        ("dos\r\nline", "dos\nline"),
    ],
)
def test_what_a_terminal_would_obey_is_gone(text: str, shown: str) -> None:
    assert safe(text) == shown


def test_one_line_where_one_is_wanted() -> None:
    assert safe("a\n\tb\x1b[2J c", keep_lines=False) == "a b c"


@examples(50)
@given(st.text(st.characters()) | st.lists(st.sampled_from("\x1b[]0;7mP\\\x07\x9b\x9c\n a")).map("".join))
def test_no_text_brings_a_control_character_through(text: str) -> None:
    shown = safe(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    shown.encode()
    assert safe(shown) == shown


@pytest.mark.slow
def test_a_folder_of_rollouts_has_a_bound_and_stays_densest_at_its_end(tmp_path: Path) -> None:
    for step in range(1, 201):
        rollouts.write(tmp_path, step, [], ["a"])
        rollouts.thin(tmp_path, 16)
        assert len(rollouts.steps(tmp_path)) <= 16
    kept = rollouts.steps(tmp_path)
    assert (kept[0], kept[-8:]) == (1, list(range(193, 201)))
    gaps = [after - before for before, after in pairwise(kept)]
    assert gaps == sorted(gaps, reverse=True), "the further back, the sparser"


def test_fewer_files_than_the_limit_all_stay(tmp_path: Path) -> None:
    for step in (1, 10, 20):
        rollouts.write(tmp_path, step, [], ["a"])
    rollouts.thin(tmp_path, 4)
    assert rollouts.steps(tmp_path) == [1, 10, 20]


@pytest.mark.parametrize("values", [[0.5, math.nan], [1, math.nan], [torch.tensor(math.nan), 0.5]])
@pytest.mark.parametrize("table_of", [rollouts.table_of, completions.table_of])
def test_numbers_beside_one_that_is_none_stay_numbers(values: list[Any], table_of: Any) -> None:
    scored = replace(group(["a", "b"], rewards=[[1.0], [0.0]]), extras={"score": values}, advantages=torch.zeros(2))
    table = table_of(1, [scored], ["r"])
    column = table["extra/score" if "extra/score" in table.column_names else "score"]
    assert str(column.type) == "double"
    assert [str(value) for value in column.to_pylist()] == [str(float(value)) for value in values]
