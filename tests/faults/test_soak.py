"""A short soak: real faults against real runs, and the table that `make soak` prints of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from soak import FAULTS, Bench, Outcome, Tally, soak
from soak.__main__ import main, show
from soak.bench import end_of
from soak.victim import Plan


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    one = Bench(tmp_path_factory.mktemp("soak"), seed=7)
    yield one
    one.close()


@pytest.mark.nightly  # each fault is met every day by a test of its own in this folder
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_survives(fault: str, bench: Bench) -> None:
    outcome = FAULTS[fault](bench)
    assert outcome.survived, outcome.said
    assert outcome.lost <= 3, "no more than the steps since the newest checkpoint that verifies, and the one before"


@pytest.mark.nightly
def test_a_run_survives_fifty_kills_at_random_moments(bench: Bench) -> None:
    hit: list[Outcome] = []
    while len(hit) < 50:  # a kill that comes after the run's end is none
        hit += soak(bench, ["kill -9"], minutes=60, count=10)[0].outcomes
    wrong = [outcome.said for outcome in hit if not outcome.survived]
    assert not wrong, wrong
    assert max(outcome.lost for outcome in hit) <= 3


@pytest.mark.nightly
def test_a_run_that_is_not_survived_is_counted_and_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(bench: Bench) -> Outcome:
        bench.run(Plan(str(bench.fresh()), steps=2))
        return Outcome(False, 2, "on purpose")

    monkeypatch.setitem(FAULTS, "lost", lose)
    heard: list[str] = []
    (tally,) = soak(bench, ["lost"], minutes=1, count=2, tell=lambda fault, outcome: heard.append(outcome.said))
    assert tally.to_json() | {"seconds": 0} == {
        "fault": "lost",
        "injected": 2,
        "survived": 0,
        "lost_mean": 2.0,
        "lost_most": 2,
        "seconds": 0,
        "wrong": ["on purpose", "on purpose"],
    }
    assert heard == ["on purpose"] * 2
    kept = sorted(bench.folder.glob("run-*/weights.sha256"))
    assert len(kept) >= 2
    assert end_of(kept[-1].parent)


@pytest.mark.nightly
def test_the_command_prints_a_table_and_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "NaN gradient", "--count", "1", "--folder", str(tmp_path / "runs")]
    assert main(words) == 0
    shown = capfd.readouterr()
    assert "| NaN gradient | 1 | 1 | 1 | 1 |" in shown.out
    assert "NaN gradient: survived, 1 steps lost" in shown.err


def test_a_fault_that_does_not_exist_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "NaN gradent"])
    assert "Did you mean NaN gradient?" in capfd.readouterr().err
    assert main(["--list"]) == 0
    assert "SIGKILL at a random moment" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_survives_a_gradient_of_nan_and_the_command_gives_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", "NaN gradient", "--count", "1", "--folder", str(tmp_path / "runs"), "--json"]) == 0
    shown = capfd.readouterr()
    (row,) = json.loads(shown.out.splitlines()[-1])["faults"]
    assert (row["fault"], row["injected"], row["survived"], row["lost_most"]) == ("NaN gradient", 1, 1, 1)
    assert "NaN gradient: survived, 1 steps lost" in shown.err


def test_faults_without_a_run_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    show([Tally(fault) for fault in FAULTS], tmp_path, as_json=True)
    shown = capfd.readouterr()
    assert "Not injected in this time: kill -9," in shown.err
    rows = json.loads(shown.out.splitlines()[-1])["faults"]
    assert {row["fault"] for row in rows} == set(FAULTS)
