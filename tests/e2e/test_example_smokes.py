"""Every example's `--smoke` runs, and what its header promises is there.

Run in this process, one after the other, so that torch is imported once. Where an example starts processes, so does its test.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from kit import rest_nightly

EXAMPLES = Path(__file__).parents[2] / "examples"
Claim = Callable[[Path, str], None]
"""Looks at the folder where the example ran, and at what it printed."""


def series(folder: Path, run: str, metric: str) -> list[float]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [found[metric] for found in map(json.loads, lines) if metric in found]


def first(values: list[float]) -> float:
    return fmean(values[:2])


def last(values: list[float]) -> float:
    return fmean(values[-4:])


def rises(run: str, metric: str = "reward", *, by: float) -> Claim:
    def claim(folder: Path, printed: str) -> None:
        values = series(folder, run, metric)
        assert last(values) > first(values) + by, values

    return claim


def falls(run: str, metric: str, *, to: float) -> Claim:
    """To at most this share of its first values."""

    def claim(folder: Path, printed: str) -> None:
        values = series(folder, run, metric)
        assert last(values) < first(values) * to, values

    return claim


def both_keep_form_and_one_keeps_diversity(folder: Path, printed: str) -> None:
    form, both = (last(series(folder, f"creative-{name}", "rewards/distinct/mean")) for name in ("form", "both"))
    assert both > form


def the_moving_reference_stays_nearer(folder: Path, printed: str) -> None:
    moving, still = (last(series(folder, f"reference-{name}", "kl")) for name in ("moving", "still"))
    assert 0 < moving < still / 2


def the_merged_model_can_do_what_both_can(folder: Path, printed: str) -> None:
    lines = [
        line.replace("%", "").split() for line in printed.splitlines() if "one-step " in line and "two-step " in line
    ]
    found = {line[0]: (int(line[2]), int(line[4])) for line in lines}
    assert all(after > before for before, after in zip(found["start"], found["merged"], strict=True)), found


def the_rescued_policy_learns_from_nothing(folder: Path, printed: str) -> None:
    name, _, before, after, *_ = printed.splitlines()[-1].split()
    assert name == "rescue"
    assert float(before) == 0.0
    assert float(after) > 0.1


def every_token_is_one_update_old(folder: Path, printed: str) -> None:
    assert series(folder, "asynchronous", "staleness/max")[1:] == [1.0] * 11


def each_row_came_from_the_file(folder: Path, printed: str) -> None:
    assert len((folder / "runs" / "live-prompts.jsonl").read_text().splitlines()) >= 16 * 12  # a quarter are replayed


def pairs_were_learnt(folder: Path, printed: str) -> None:
    report = json.loads((folder / "runs" / "reward-model" / "judge" / "reward_training.json").read_text())
    assert report["accuracy"] > 0.7
    assert series(folder, "reward-model/second", "kl")[-1] > 0
    lengths = series(folder, "reward-model/second", "completions/mean_length")
    assert last(lengths) < first(lengths)  # what the pairs preferred


def three_languages_are_measured(folder: Path, printed: str) -> None:
    rows = [line for line in printed.splitlines() if line.startswith(("| start", "| mixed"))]
    assert len(rows) == 2
    assert all(row.count(" to ") == 3 for row in rows), rows


def what_clients_like_is_written_more_often(folder: Path, printed: str) -> None:
    before, after = (
        float(line.partition("problems, ")[2].split(" ")[0].rstrip("%")) for line in printed.splitlines()[-2:]
    )
    assert after > before + 15, printed
    assert "was promoted" in printed


def the_collapse_is_told_while_the_reward_rises(folder: Path, printed: str) -> None:
    alerts = [json.loads(line) for line in (folder / "runs/collapse-plain-0/alerts.jsonl").read_text().splitlines()]
    (alert,) = (one for one in alerts if one["rule"] == "language_collapse")
    before, after = alert["evidence"]["same_language_de"]
    assert after < before - 0.1
    assert "the reward has not fallen" in alert["said"]


def the_printed_reward_rises(folder: Path, printed: str) -> None:
    rewards = [float(value) for value in re.findall(r"^rollout \d+: reward ([\d.]+)", printed, re.M)]
    assert len(rewards) == 12
    assert last(rewards) > first(rewards) + 0.15, rewards


SMOKES: dict[str, list[Claim]] = {
    "maths.py": [rises("maths", by=0.15)],
    "programs.py": [rises("programs", by=0.15)],
    "dialogue.py": [
        rises("dialogue", f"rewards/{name}/mean", by=0.1) for name in ("relevance", "context", "coherence", "style")
    ],
    "summaries.py": [rises("summaries", "rewards/rouge/mean", by=0.15), rises("summaries", "rewards/brief/mean", by=0.03)],
    "creative_writing.py": [
        rises("creative-form", "rewards/rhyme/mean", by=0.3),
        rises("creative-both", "rewards/rhyme/mean", by=0.3),
        both_keep_form_and_one_keeps_diversity,
    ],
    "translation.py": [rises("translation", by=0.15)],
    "tools.py": [rises("tools", by=0.2), rises("tools", "tools/call_frequency", by=0.2)],
    "structured_output.py": [
        rises("structured", "rewards/json_schema/mean", by=0.2), rises("structured", "rewards/right_values/mean", by=0.05)
    ],
    "grpo_in_one_file.py": [the_printed_reward_rises],
    "own_algorithm.py": [rises("own-algorithm", by=0.15), rises("own-algorithm", "sure/share", by=0)],
    "ppo_beside_grpo.py": [rises("beside-grpo", by=0.15), rises("beside-ppo", by=0.1)],
    "moving_reference.py": [rises("reference-moving", by=0.1), the_moving_reference_stays_nearer],
    "ensemble_rescue.py": [the_rescued_policy_learns_from_nothing],
    "live_data.py": [rises("live", by=0.05), each_row_came_from_the_file],
    "lora.py": [rises("lora", by=0.15)],
    "qlora.py": [rises("qlora", by=0.15)],
    "distillation.py": [rises("teacher", by=0.15), rises("student", by=0.15)],
    "merging.py": [the_merged_model_can_do_what_both_can],
    "languages/train.py": [rises("languages-mixed-0", by=0.2), three_languages_are_measured],
    "languages/collapse.py": [rises("collapse-plain-0", by=0.2), the_collapse_is_told_while_the_reward_rises],
}  # fmt: skip
KINDS = ("maths.py",)
"""In CI; the others nightly."""
PROCESSES: dict[str, list[Claim]] = {
    "asynchronous.py": [rises("asynchronous", by=0.15), every_token_is_one_update_old],
    "images/train.py": [],
    "sound/train.py": [],
    "agents/calculator.py": [],
    "agents/game.py": [],
    "live/feedback.py --likes polite": [what_clients_like_is_written_more_often],
    "live/feedback.py --likes german": [what_clients_like_is_written_more_often],
    "reward_model.sh": [pairs_were_learnt],
}
WITH_SMOKES = {*SMOKES, *(name.split()[0] for name in PROCESSES), "agents/openenv_harness.py"}  # `make test-openenv`
NO_SMOKES = {"tiny.py", "trl_script.py"}
"""Shared by the others, and a script of another library."""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # they are the example's reader's, not ours
@pytest.mark.parametrize("name", rest_nightly(SMOKES, KINDS))
def test_a_smoke_shows_what_its_header_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(name, "--smoke", monkeypatch)
    printed = capsys.readouterr().out
    for claim in SMOKES[name]:
        claim(tmp_path, printed)


def run(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example with an option, in this process; modules beside it are its own."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), option])
    monkeypatch.syspath_prepend(str((EXAMPLES / name).parent))
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        for module in [
            key for key, one in sys.modules.items() if str(getattr(one, "__file__", None)).startswith(str(EXAMPLES))
        ]:
            del sys.modules[module]


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROCESSES)
def test_a_smoke_that_starts_processes_does_too(name: str, tmp_path: Path) -> None:
    path, *options = name.split()
    first_word = "bash" if path.endswith(".sh") else sys.executable
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [first_word, str(EXAMPLES / path), *options, "--smoke"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for claim in PROCESSES[name]:
        claim(tmp_path, done.stdout)


@pytest.mark.nightly
def test_a_mistyped_option_ends_an_example_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in sorted(WITH_SMOKES):
        for option, code in (("--smokes", 2), ("--help", 0)):
            if name.endswith(".sh"):
                done = subprocess.run(["bash", str(EXAMPLES / name), option], capture_output=True, text=True)
                ended, out, err = done.returncode, done.stdout, done.stderr
            else:
                with pytest.raises(SystemExit) as stopped:
                    run(name, option, monkeypatch)
                ended, (out, err) = stopped.value.code, capsys.readouterr()
            assert ended == code, name
            assert ("A real model" in out) if code == 0 else (option in err), name
    assert not list(tmp_path.iterdir())


def test_every_example_is_on_its_page_and_its_header_says_what_to_do_and_to_expect() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    on_page = {name for name in re.findall(r"\(\.\./examples/([\w/.]+)\)", page) if (EXAMPLES / name).is_file()}
    assert on_page >= WITH_SMOKES
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.yaml")):
        assert path.name in on_page, f"{path.name} is not on docs/examples.md"
    for name in sorted({*on_page, *WITH_SMOKES}):
        header = "\n".join((EXAMPLES / name).read_text().splitlines()[:16])
        if name.endswith((".py", ".sh")) and name not in NO_SMOKES and not name.startswith("distributed/"):
            assert name in WITH_SMOKES, f"{name} has no smoke"
            assert f"examples/{name} --smoke" in header, f"{name}: its header says how to try it"
            assert "A real model" in header, f"{name}: its header says what to change for a real model"
            assert "Expect: " in header, f"{name}: its header says what to expect"


def test_an_example_imports_covey_before_torch() -> None:
    """Else OpenMP's threads wait without sleeping, and a smoke on a busy machine takes many times as long."""
    for path in sorted({*EXAMPLES.rglob("*.py")} - {*EXAMPLES.glob("custom/*")}):  # those are parts, imported by a run
        lines = path.read_text().splitlines()
        first = {
            word: next((n for n, line in enumerate(lines) if re.match(rf"(import|from) {word}\b", line)), None)
            for word in ("covey", "tiny", "warm_up", "torch", "peft", "transformers", "tokenizers")
        }
        with_torch = [
            first[word] for word in ("torch", "peft", "transformers", "tokenizers") if first[word] is not None
        ]
        before = [first[word] for word in ("covey", "tiny", "warm_up") if first[word] is not None]
        assert not (with_torch and before) or min(before) < min(with_torch), f"{path.name}: import covey first"
