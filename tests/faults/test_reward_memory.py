"""A reward model that runs out of memory, under a real limit of the address space: smaller batches, the same scores, for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import lines

import forked
from covey.runs import checkpoint

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is enforced on Linux"),
]


def run(*words: str) -> dict[str, Any]:
    if words[1] == "0":  # a limit is for a process of its own, whose heap has no room to spare
        whole = forked.run(HERE / "scoring_in_little_memory.py", *words, timeout=600)
        assert whole.returncode == 0, whole.err[-3000:]
        return dict(json.loads(whole.out.splitlines()[-1]))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(HERE / "scoring_in_little_memory.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_reward_model_that_does_not_fit_reads_less_at_a_time_and_a_resumed_run_knows(tmp_path: Path) -> None:
    free, short = tmp_path / "free", tmp_path / "short"
    run("run", "0", str(free), "5")
    run("run", "50", str(short), "3")
    told = lines(short, "events.jsonl")
    assert [(event["kind"], event["step"]) for event in told] == [("out_of_memory", 2)]
    assert "'judge of apples' scored 32 texts" in told[0]["said"]
    bound = checkpoint.load_state(short / "checkpoint-3")["scorer"]["portions"]
    assert str(bound["apples"]) in told[0]["said"]
    run("run", "50", str(short), "5")
    assert lines(short, "events.jsonl") == told, "the resumed run begins with what was found to fit"
    for name in ("reward", "reward_std", "grad_norm"):
        values = [[line[name] for line in lines(folder)] for folder in (free, short)]
        assert len(values[0]) == 5
        assert values[1] == pytest.approx(values[0], rel=1e-5), name
    assert not any("rewards/apples/errors" in line for line in lines(short))


def test_a_text_that_does_not_fit_alone_costs_its_own_score_and_no_other(tmp_path: Path) -> None:
    free, short = run("one", "0"), run("one", "30")
    assert free["said"] == []
    assert short["scores"][:3] == pytest.approx(free["scores"][:3], abs=1e-5)
    assert short["scores"][3] != short["scores"][3], "no score is not a score of 0"
    assert "does not fit in memory with 'judge of apples', even alone; lower max_completion_length" in short["said"][-1]
