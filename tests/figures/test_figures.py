"""Figures of run folders: what is drawn, in which files, and the report that is sent to somebody."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import covey
from covey.cli import main
from covey.errors import ConfigError, RunFolderError
from covey.evaluation.compare.svg import _spans
from covey.evaluation.figures import Confusion, Shares
from covey.evaluation.figures.report import report_of
from covey.runs import RunFolder, evaluations
from covey.types import Alert, Completion, Group, Prompt

EVIL = "<script>alert(1)</script>"


def group(question: str, right: list[float], neat: list[float]) -> Group:
    done = tuple(
        Completion(token_ids=torch.tensor([1, 2]), text=f"says {EVIL} {i}", finish="stop") for i in range(len(right))
    )
    prompt = Prompt(uid=question, token_ids=(1,), text=question)
    return Group(prompt=prompt, completions=done, rewards=torch.tensor([right, neat], dtype=torch.float32).T)


def written(folder: Path, seed: int = 0, **args: object) -> Path:
    run = RunFolder.create(folder)
    run.describe(args={"seed": seed, "learning_rate": 1e-6, **args})
    for step in (1, 2, 3):
        logs = {"reward": 0.1 * step + seed, "entropy": 1.0, "rewards/right/mean": 0.5, "rewards/neat/mean": 0.5,
                "rewards/right/advantage_share": 0.75, "rewards/neat/advantage_share": 0.25}  # fmt: skip
        run.append_metrics(step, logs, {"step": 60.0})
        groups = [group("q1", [1, 0, 0, 1], [1, 0, 1, 1]), group("q2", [0, float(step > 1)], [0, 1])]
        run.write_rollouts(step, groups, ["right", "neat"])
        rows = evaluations.rows_of(
            [group(f"e{i}", [float(i < step)], [0.0]) for i in range(4)], ["right", "neat"], [1.0, 1.0]
        )
        run.write_evaluation(step, "eval", {"eval_reward": step / 4}, rows)
    run.append_alert(
        Alert(rule="kl", severity="warning", step=2, said=f"too far {EVIL}", evidence={}, try_this=("beta up",))
    )
    run.close()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    for seed in range(3):
        written(folder / f"base-{seed}", seed)
    written(folder / "fast-0", learning_rate=1e-5)
    return folder


def test_seeds_are_one_line_with_a_band_and_another_option_is_another_line(runs: Path) -> None:
    picture = covey.plot(runs, ["reward"])
    (curve,) = picture.figures
    assert [len(line.runs) for line in curve.lines] == [3, 1]
    assert curve.lines[0].middle == pytest.approx([1.1, 1.2, 1.3])  # mean of 0.1 + {0, 1, 2}
    assert all(
        low < middle < high
        for low, middle, high in zip(curve.lines[0].low, curve.lines[0].middle, curve.lines[0].high, strict=True)
    )
    assert "3 seeds" in picture.titles[0]
    assert len(covey.plot(runs, ["reward"], each=True).titles) == 4


def test_a_run_that_was_made_twice_is_not_called_two_seeds(runs: Path, tmp_path: Path) -> None:
    for name in ("once", "again"):
        written(tmp_path / name, seed=0)
    assert "2 runs" in covey.plot(tmp_path, ["reward"]).titles[0]


def test_the_band_of_one_run_is_the_interval_over_its_questions(runs: Path) -> None:
    held = next(figure for figure in covey.Run(runs / "base-0").plot().figures if figure.name == "eval_reward")
    (line,) = held.lines
    assert line.middle == [0.25, 0.5, 0.75]
    assert (line.low[1], line.high[1]) == pytest.approx((0.15, 0.85), abs=0.01)  # Wilson, 2 of 4
    low, high = _spans(replace(held, lines=[replace(line, runs=[[(1, 0.5), (2, 0.51)]], middle=[0.5, 0.5, 0.51])]))[1]
    assert low <= min(line.low) < max(line.high) <= high, "a line that hardly moves has its whole band in the picture"


def test_a_run_without_evaluations_stands_beside_one_that_has_some(runs: Path, tmp_path: Path) -> None:
    never = written(tmp_path / "never", learning_rate=1e-4)
    shutil.rmtree(never / "evaluations")
    (never / "evaluations.jsonl").unlink()
    held = next(f for f in covey.plot([runs / "fast-0", never]).figures if f.name == "eval_reward")
    assert [line.steps for line in held.lines] == [[1, 2, 3], []]


def test_shares_and_verdicts_are_those_of_the_files(runs: Path) -> None:
    figures = covey.Run(runs / "base-0").plot().figures
    (shares,) = (figure for figure in figures if isinstance(figure, Shares))
    assert shares.parts == {"neat": [0.25] * 3, "right": [0.75] * 3}
    agreed, learned = (figure for figure in figures if isinstance(figure, Confusion))
    # q1, three times: right/neat 1/1, 0/0, 0/1, 1/1; q2: 0/0, then 0/1 once and 1/1 twice
    assert (agreed.rows, agreed.columns, agreed.counts) == ("right", "neat", [[6, 4], [0, 8]])
    assert learned.counts == [[1, 2], [0, 1]]  # of four questions one was right, then three


@pytest.mark.parametrize("kind", ["svg", "html"])
def test_a_picture_is_written_without_a_drawing_library(runs: Path, tmp_path: Path, kind: str) -> None:
    assert main(["plot", str(runs), "-o", str(tmp_path / f"a.{kind}")]) == 0
    content = (tmp_path / f"a.{kind}").read_text()
    assert "held-out reward on eval" in content
    assert "share of each reward in the advantage" in content
    if kind == "svg":
        assert ET.fromstring(content).tag.endswith("svg")


@pytest.mark.nightly
def test_a_picture_is_written_as_png(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plot", str(runs / "base-0"), "-o", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_wrong_names_are_refused_with_what_is_there(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean reward"):
        covey.Run(runs / "base-0").plot("rewrd")
    with pytest.raises(ConfigError, match=r"\.svg, \.html, \.png"):
        covey.Run(runs / "base-0").plot("reward").save(tmp_path / "a.gif")
    with pytest.raises(RunFolderError, match="holds runs and is none itself"):
        covey.Run(runs)
    with pytest.raises(RunFolderError, match="it has 1, 2, 3"):
        covey.Run(runs / "base-0").rollouts(7)
    assert main(["report", str(runs)]) != 0
    assert main(["plot", str(tmp_path / "nothing"), "-o", "a.svg"]) != 0


def test_a_run_before_its_first_step_says_that_nothing_is_recorded(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "new")
    run.describe(args={"seed": 0})
    run.close()
    with pytest.raises(RunFolderError, match="recorded nothing to draw yet"):
        covey.Run(tmp_path / "new").plot()
    assert "recorded nothing" in report_of(tmp_path / "new")
    assert "<table>" in covey.Run(tmp_path / "new")._repr_html_()


def test_the_report_says_how_the_run_ended_and_what_it_scores(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "base-0"), "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "at step 3; held-out reward on eval 0.75 (95% 0.301 to 0.954), from 0.25 at step 1. 1 warning." in page
    assert "Try: beta up" in page
    assert "3.0 min" in page
    assert "Model card" in page


def test_a_report_runs_nothing_and_fetches_nothing(runs: Path) -> None:
    page = report_of(runs / "base-0")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r'(?:src|href)="', page)
    assert "default-src 'none'" in page


def test_a_reward_of_a_file_has_the_name_of_the_file_in_the_report() -> None:
    from covey.evaluation.figures.report import _name

    assert _name({"name": "covey_user_my_reward_9e2139084920:right"}) == "my_reward.py:right"
    assert _name({"name": "package.module:right"}) == "package.module:right"


def test_the_report_holds_the_card_that_the_run_wrote(runs: Path) -> None:
    (runs / "fast-0" / "model").mkdir()
    (runs / "fast-0" / "model" / "README.md").write_text("# My card\n")
    assert "# My card" in report_of(runs / "fast-0")


def test_a_run_shows_itself_in_a_notebook(runs: Path) -> None:
    run = covey.Run(runs / "base-0")
    assert repr(run).endswith("step 3, held-out reward (eval) 0.75, reward 0.3, entropy 1)")
    shown = run._repr_html_()
    assert "<svg" in shown
    assert "base-0" in shown
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert len(run.rollouts(2)) == 6


def test_a_report_of_many_evaluations_reads_the_answers_of_those_that_it_shows(tmp_path, monkeypatch) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.describe(args={"seed": 0})
    run.append_metrics(1, {"reward": 0.5}, {"step": 1.0})
    rows = evaluations.rows_of([group(f"e{i}", [float(i % 2)], [0.0]) for i in range(8)], ["right", "neat"], [1.0, 1.0])
    for step in range(1, 151):
        run.write_evaluation(step, "eval", {"eval_reward": 0.5}, rows)
    run.close()
    read, opened = evaluations.read, set()
    monkeypatch.setattr(evaluations, "read", lambda path: (opened.add(path.name), read(path))[1])
    page = report_of(run.path)
    assert "140 evaluations between are left out" in page
    assert "0.5 (95% 0.2" in page
    assert len(opened) == 10
