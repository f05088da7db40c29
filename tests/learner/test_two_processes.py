"""Two processes take the step that one takes: the same gradients, metrics and logs, one checkpoint, an exact resume."""

from pathlib import Path

import pytest
import torch
from two_process_work import CASES, SHARES, flat_model, float32_step_of, idle_steps_of, step_of, trained

from covey.process.world import World
from forked import Forked, free_port, rank_environment
from kit import rest_nightly, tiny_model

QUICK = (
    "ppo with a model of its own",
    "kl-cov",
    "prompt mean",
    "whitened weights",
    "grpo",
    "gspo",
    "gdpo",
    "gigpo",
    "mopd",
    "rlsd",
)
"""Cases that sum over a batch, a group, a completion or tokens, and those with a teacher; others repeat one of these."""

SCRIPT = """
import signal
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, str(Path(sys.argv[1]) / "learner"))
import torch
from two_process_work import work

signal.alarm(200)  # one that hangs ends
torch.set_num_threads(1)
work(Path(sys.argv[2]), sys.argv[3:])
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory, request):
    """What two processes with torchrun's environment found, by rank, and the folder they worked in."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = [item.callspec.params["name"] for item in tests if "name" in item.callspec.params]
    folder, port = tmp_path_factory.mktemp("pair"), free_port()
    words = ["-c", SCRIPT, Path(__file__).parents[1], folder, *cases]
    ranks = [Forked(*words, env=rank_environment(rank, port)) for rank in range(2)]
    assert [rank.wait(240) for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The trainer's run in this process alone."""
    return trained(tmp_path_factory.mktemp("alone"), 1)


def apart(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("name", rest_nightly(CASES, QUICK))
def test_one_step_has_the_same_gradient_and_says_the_same(name, pair):
    (first, second), _ = pair
    expected, metrics = step_of(name, World())
    found, reported = first["steps"][name]
    assert expected.abs().max() > 0
    assert torch.equal(found, second["steps"][name][0]), "both processes end with the same weights"
    assert apart(found, expected) <= 1e-6
    assert set(reported) == set(metrics)
    for key, value in metrics.items():
        assert reported[key] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), key


@pytest.mark.parametrize("share", SHARES)
def test_sums_that_begin_in_the_backward_pass_are_those_of_one_process(share, pair):
    (first, second), _ = pair
    expected, _, _ = float32_step_of(share, World())
    found, seen, _ = first["float32"][share]
    assert torch.equal(found, second["float32"][share][0])
    assert apart(found, expected) <= 1e-6
    ((begun, buckets),) = seen
    assert buckets > 3
    assert begun > 3, "the first rank had a backward pass, in which sums began"


def test_memory_that_runs_out_after_a_sum_has_begun_repeats_the_step_on_every_process(pair):
    (first, second), _ = pair
    expected, _, _ = float32_step_of("as they come", World())
    for found, seen, events in (first["spoiled"], second["spoiled"]):
        assert apart(found, expected) <= 1e-6
        assert [begun > 0 for begun, _ in seen] == [True, False], (
            "the second time sums begin after the last micro-batch"
        )
        assert len(events) <= 1
    assert second["spoiled"][2] == ["out_of_memory"]
    assert torch.equal(first["spoiled"][0], second["spoiled"][0])


def test_values_of_unequal_length_are_gathered_in_the_order_of_ranks(pair):
    for found in pair[0]:
        assert [[one["rank"] for one in part] for part in found["gathered"]] == [[0], [1]]
        assert [[one["ids"].tolist() for one in part] for part in found["gathered"]] == [[[0, 1, 2]], [list(range(43))]]


def test_a_step_in_which_nothing_teaches_leaves_the_weights_alone_in_both(pair):
    before, after = idle_steps_of(World())
    assert torch.equal(before, after)
    for found in pair[0]:
        assert torch.equal(*found["idle"])


def test_a_run_ends_with_the_same_weights(pair, alone):
    (first, second), _ = pair
    assert apart(alone["weights"], flat_model(tiny_model(hidden=16))) > 1e-3, "it has learnt something"
    assert apart(first["whole"]["weights"], alone["weights"]) <= 1e-5
    assert torch.equal(first["whole"]["weights"], second["whole"]["weights"])


def test_a_run_logs_the_same_history(pair, alone):
    for found in pair[0]:
        history = found["whole"]["history"]
        assert len(history) == len(alone["history"]) == 4  # 3 steps and the summary
        for entry, expected in zip(history[:3], alone["history"][:3], strict=True):
            assert set(entry) == set(expected)
            for exact in ("reward", "reward_std", "completions/mean_length", "num_tokens", "epoch", "step"):
                assert entry[exact] == expected[exact], exact
            measured = {key for key in entry if not key.startswith("memory/")} - {
                "step_time",
                "rewards/reward/seconds",
                "weights/seconds",
            }
            near = lambda value: value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True)
            for key in measured:
                assert entry[key] == near(expected[key]), key
        assert len({entry["reward"] for entry in history[:3]}) > 1


def test_a_run_is_written_down_once(pair):
    _, folder = pair
    saved = sorted(path.name for path in (folder / "whole").glob("checkpoint-*"))
    assert saved == ["checkpoint-2", "checkpoint-3"], "one of each, and the last step's"
    assert len((folder / "whole" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(pair):
    for found in pair[0]:
        assert found["resumed"]["step"] == 3
        assert torch.equal(found["resumed"]["weights"], found["whole"]["weights"])
        assert found["resumed"]["history"][2]["reward"] == found["whole"]["history"][2]["reward"]


def test_a_signal_to_one_process_stops_both_at_the_same_step_with_a_checkpoint(pair):
    (first, second), folder = pair
    assert first["interrupted"]["step"] == second["interrupted"]["step"] == 1  # the second was left in the middle
    assert torch.equal(first["interrupted"]["weights"], second["interrupted"]["weights"])
    assert [path.name for path in (folder / "interrupted").glob("checkpoint-*")] == ["checkpoint-1"]
