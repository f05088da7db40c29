"""A model that is split over two processes takes the step, draws the completions and ends the run of a whole one."""

import pytest
import sharded_cases as cases
import torch
from transformers import AutoModelForCausalLM

from covey.process.world import World
from forked import Forked, free_port, rank_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # processes of their own on a machine that others load


def two_processes(folder, which):
    """What two processes with torchrun's environment found, by rank."""
    port = free_port()
    ranks = [Forked(cases.__file__, folder, which, env=rank_environment(rank, port)) for rank in range(2)]
    assert [rank.wait(600) for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two processes found, what one found, and the folder: one process has done the first two of six steps before."""
    folder = tmp_path_factory.mktemp("pair")
    cases.trained(folder / "one", 1, **{**cases.STEPS, "max_steps": 2})
    return two_processes(folder, "quick"), folder


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """The same of every preset and every way of splitting."""
    return two_processes(tmp_path_factory.mktemp("every"), "every")


def apart(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def expect_case(name, found):
    (first, second), (expected, metrics) = found, cases.case_of(name, World())
    assert expected.abs().max() > 0
    gradient, reported = first["cases"][name]
    assert torch.equal(gradient, second["cases"][name][0]), "both processes end with the same weights"
    assert apart(gradient, expected) <= 1e-6
    assert set(reported) == set(metrics)
    for key, value in metrics.items():
        assert reported[key] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), key


def expect_run(name, found, folder):
    alone = cases.trained(
        folder / "alone", 1, **{**cases.RUNS[name], "fsdp": None, "deepspeed": None, "fsdp_config": None}
    )
    first, second = (one["runs"][name] for one in found)
    assert torch.equal(first["weights"], second["weights"])
    assert apart(first["weights"], alone["weights"]) <= 1e-5
    assert losses(first) == pytest.approx(losses(alone), abs=1e-5)
    if name in cases.RESUMED:
        assert all(torch.equal(one["resumed"][name]["weights"], one["runs"][name]["weights"]) for one in found)
    assert alone["split"] == 0
    assert first["split"] > 0
    assert first["held"] == pytest.approx(0.5, abs=0.02), "each process holds half of the weights"


def losses(run):
    return [entry["loss"] for entry in run["history"] if "loss" in entry]


@pytest.mark.parametrize("name", cases.QUICK_CASES)
def test_one_step_has_the_same_gradient_and_says_the_same(name, pair):
    expect_case(name, pair[0])


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(cases.CASES) - set(cases.QUICK_CASES)))
def test_one_step_of_every_preset_has_the_same_gradient(name, every):
    expect_case(name, every)


@pytest.mark.parametrize("name", cases.SCALED)
def test_a_scaled_loss_has_the_same_gradient_and_an_overflow_on_one_process_counts_on_both(name, pair):
    (gradient, skipped), scales = cases.scaled_of(name, World())
    assert skipped.abs().max() == 0
    assert apart(gradient, cases.case_of(name, World())[0]) <= 1e-12
    for (found, left_out), found_scales in (one["scaled"][name] for one in pair[0]):
        assert apart(found, gradient) <= 1e-6
        assert left_out.abs().max() == 0
        assert found_scales == scales == [65536.0, 32768.0]


@pytest.mark.parametrize("share", cases.SHARES)
def test_processes_with_unequal_numbers_of_passes_keep_pace(share, pair):
    (first, second), _ = pair
    assert torch.equal(first["shares"][share], second["shares"][share])
    assert apart(first["shares"][share], cases.share_of(share, World())) <= 1e-6


def test_a_step_in_which_nothing_teaches_leaves_the_weights_alone(pair):
    for found in pair[0]:
        assert torch.equal(*found["tied"])


def test_weights_are_gathered_once_a_rollout_and_freed(pair):
    (first, second), _ = pair
    counts = [[count for count, _ in one["sampled"]["found"]] for one in (first, second)]
    parts = first["sampled"]["parts"]
    assert parts == 3, "two layers, and what is outside of them"
    assert counts == [[parts, parts], [parts, parts]], "whatever the number of tokens, also without a prompt"
    assert [texts for _, texts in first["sampled"]["found"]] == cases.sampled_alone()
    assert [texts for _, texts in second["sampled"]["found"]] == [[], []]
    for before, after in (first["sampled"]["held"], second["sampled"]["held"]):
        assert before == after


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.")
@pytest.mark.parametrize("name", cases.QUICK_RUNS)
def test_a_run_ends_with_the_same_weights(name, pair, tmp_path):
    expect_run(name, pair[0], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(cases.RUNS) - set(cases.QUICK_RUNS)))
def test_a_run_split_in_any_way_ends_with_the_same_weights(name, every, tmp_path):
    expect_run(name, every, tmp_path)


def test_supervised_fine_tuning_ends_with_the_same_weights(pair, tmp_path):
    alone, _ = cases.learnt(tmp_path, 1)
    for weights, held in (found["learnt"] for found in pair[0]):
        assert apart(weights, alone) <= 1e-5
        assert held == 0, "nothing is drawn, so no copy of the weights is kept"


def test_a_run_goes_on_over_one_two_and_one_processes(pair):
    (first, _), folder = pair
    unbroken = first["legs"]["unbroken"]
    assert first["legs"]["middle"]["split"] > 0
    last = cases.trained(folder / "one", 1, resume=str(folder / "one" / "checkpoint-4"), **cases.STEPS)
    assert losses(last) == pytest.approx(losses(unbroken), abs=1e-6)
    for name in ("completions/mean_length", "reward"):
        assert [e.get(name) for e in last["history"]] == pytest.approx([e.get(name) for e in unbroken["history"]])
    assert apart(last["weights"], unbroken["weights"]) <= 1e-4  # Adam takes the sign of what is all but zero


@pytest.mark.nightly
def test_a_run_goes_on_over_two_one_and_two_processes_with_the_same_prompts(pair):
    """The first two steps are those of the run that two processes do without a break."""
    (first, _), folder = pair
    unbroken, less = first["legs"]["unbroken"], folder / "less"
    middle = cases.trained(less, 1, resume=str(folder / "two" / "checkpoint-2"), **{**cases.STEPS, "max_steps": 4})
    last, other = two_processes(less, "last leg")
    assert middle["split"] == 0
    assert last["split"] > 0
    assert torch.equal(last["weights"], other["weights"])
    assert losses(last) == pytest.approx(losses(unbroken), abs=1e-6)
    assert len(losses(last)) == 6
    assert cases.drawn(less) + cases.drawn(less / "last") == cases.drawn(folder / "two")[2:]


def test_a_run_goes_on_to_the_bit_on_as_many_processes(pair):
    for found in pair[0]:
        assert torch.equal(found["legs"]["again"]["weights"], found["legs"]["unbroken"]["weights"])
        assert losses(found["legs"]["again"]) == losses(found["legs"]["unbroken"])


def test_the_checkpoint_of_a_split_model_opens_as_any_other(pair):
    (first, _), folder = pair
    saved = AutoModelForCausalLM.from_pretrained(folder / "two" / "checkpoint-6").state_dict()
    whole = torch.cat([value.flatten().double() for _, value in sorted(saved.items())])
    assert torch.equal(whole, first["legs"]["unbroken"]["weights"])
    assert len(list((folder / "two" / "checkpoint-6" / "sharded").glob("*.distcp"))) == 2, "each process wrote its part"
