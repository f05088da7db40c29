"""Memory runs out for real, under a limit of the address space: the same work in smaller pieces, the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from covey.learner import FrozenCopy, Policy
from faults.small_runs import lines, trainer
from kit import rest_nightly

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is enforced on Linux")


def run(what, spare_mib):
    if not spare_mib:  # a limit is for a process of its own, whose heap has no room to spare
        whole = forked.run(HERE / "out_of_memory.py", what, "0", timeout=600)
        assert whole.returncode == 0, whole.err
        return json.loads(whole.out.splitlines()[-1])
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(HERE / "out_of_memory.py"), what, str(spare_mib)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_taken_in_smaller_micro_batches_with_the_same_gradient():
    free, short = run("learn", 0), run("learn", 80)
    assert free["events"] == []
    assert free["rows"] == 16
    assert set(short["events"]) == {"out_of_memory"}
    assert short["rows"] < 16
    assert short["later_events"] == [], "what fits is remembered"
    assert short["norms"] == pytest.approx(free["norms"], rel=1e-6)


@pytest.mark.nightly
def test_the_same_where_products_are_code_that_is_made_while_it_runs():
    """Such code takes memory of its own, so a later step may find that still less fits."""
    free, short = run("learn-as-is", 0), run("learn-as-is", 80)
    assert set(short["events"]) == {"out_of_memory"}
    assert short["rows"] < 16
    assert short["norms"] == pytest.approx(free["norms"], rel=1e-6)


@pytest.mark.nightly
def test_an_optimizer_whose_state_does_not_fit_is_told_before_any_weight_changes():
    free, short = run("update", 0), run("update", 4)
    assert free["said"] == ""
    assert free["changed"] == free["of"]
    assert "The state of AdamW" in short["said"]
    assert "8-bit optimizer" in short["said"]
    assert short["changed"] == 0


@pytest.mark.nightly
def test_completions_of_which_none_fits_alone_end_with_a_sentence():
    short = run("learn-cold", 55)
    assert short["raised"] == "MemoryLimitError"
    assert "does not fit in memory" in short["said"]
    assert "gradient_checkpointing" in short["said"]


@pytest.mark.nightly
def test_a_single_completion_that_does_not_fit_alone_is_left_out_and_the_others_learn():
    free, short = run("learn-silent-giant", 0), run("learn-giant", 30)
    assert free["left_out"] == []
    assert short["left_out"] == [1.0, 1.0]
    assert short["events"][-1] == "completion_left_out"
    assert "A completion of 900 tokens to prompt b" in short["said"][-1]
    assert short["norms"] == pytest.approx(free["norms"], rel=1e-6)


@pytest.mark.nightly
def test_activations_are_computed_again_once_a_single_completion_does_not_fit():
    short = run("learn-cold-checkpointing", 55)
    assert short["checkpoints"]
    assert short["rows"] == 1
    assert short["later_events"] == []


@pytest.mark.nightly
def test_a_sampler_that_runs_out_goes_on_with_fewer_in_flight_and_draws_the_same_tokens():
    free, short = run("sample", 0), run("sample", 25)
    assert free["rows"] == 64
    assert short["rows"] < 64
    assert short["answers"] == free["answers"]


@pytest.mark.parametrize("fails", rest_nightly([Policy, FrozenCopy], 1), ids=["policy", "reference"])
def test_memory_that_runs_out_while_the_rollout_is_measured_costs_nothing(fails, tmp_path, monkeypatch):
    options = {"max_steps": 2, "beta": 0.1, "num_iterations": 2, "save_strategy": "no"}
    if fails is FrozenCopy:
        options |= {"sync_ref_model": True, "ref_model_sync_steps": 100}
    free = trainer(tmp_path / "free", **options)
    free.train()
    real, left = fails.measure, [1]

    def measure(self, rows, **given):
        if len(rows) > 4 and left:
            left.pop()
            raise MemoryError("no room")
        return real(self, rows, **given)

    monkeypatch.setattr(fails, "measure", measure)
    short = trainer(tmp_path / "short", **options)
    short.train()
    assert not left
    assert short._running.learner.micro_batcher.limits.max_rows < free._running.learner.micro_batcher.limits.max_rows
    assert [line["kind"] for line in lines(tmp_path / "short", "events.jsonl")] == ["out_of_memory"]
    norms = [[line["grad_norm"] for line in lines(tmp_path / name)] for name in ("free", "short")]
    assert norms[0][:1] == pytest.approx(norms[1][:1], rel=1e-6)
    assert len(norms[1]) == 2
