"""The page about checking data says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from covey.doctor.data_check.findings import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "data-check.md").read_text(encoding="utf-8")


def test_every_kind_of_fault_stands_in_the_table_and_no_other():
    table = PAGE.partition("## What is looked for")[2].partition("## How")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)] == list(KINDS)


def test_the_code_runs_as_it_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": f"What are {number} and {number + 1} together?", "answer": str(2 * number + 1)}
        for number in range(30)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:20], rows[3]]))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[19:]))
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {"__name__": "page"})
    assert capsys.readouterr().out.splitlines() == [
        "duplicate [20]",
        "contaminated [19]",
        "19 {'contaminated': 1, 'duplicate': 1}",
    ]  # fmt: skip
