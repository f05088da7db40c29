"""Processes that share out the tokens of each row take the step and end the run of a process that computes whole rows."""

import context_cases as cases
import pytest
import torch

from covey.process.world import World
from forked import Forked, free_port, rank_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # processes of their own on a machine that others load


def processes(folder, which, size=2):
    port = free_port()
    ranks = [Forked(cases.__file__, folder, which, env=rank_environment(rank, port, size)) for rank in range(size)]
    assert [rank.wait(400) for rank in ranks] == [0] * size, [rank.err[-3000:] for rank in ranks]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return processes(tmp_path_factory.mktemp("pair"), "quick")


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return processes(tmp_path_factory.mktemp("every"), "every")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return processes(tmp_path_factory.mktemp("four"), "four", 4)


def apart(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def expect_step(ranks, expected, limit=1e-6):
    gradient, metrics = expected
    assert gradient.abs().max() > 0
    for found, reported in ranks:
        assert torch.equal(found, ranks[0][0]), "all processes end with the same weights"
        assert apart(found, gradient) <= limit
        assert set(reported) == set(metrics)
        for key, value in metrics.items():
            assert reported[key] == pytest.approx(value, rel=max(limit, 1e-6), abs=1e-7, nan_ok=True), key


def expect_run(name, ranks, folder):
    alone = cases.trained(folder, 1, **{**cases.RUNS[name], "fsdp": None})
    assert [rank["runs"][name]["context"] for rank in ranks] == [2] * len(ranks)
    losses = lambda run: [entry["loss"] for entry in run["history"] if "loss" in entry]
    for rank in ranks:
        assert torch.equal(rank["runs"][name]["weights"], ranks[0]["runs"][name]["weights"])
        assert apart(rank["runs"][name]["weights"], alone["weights"]) <= 1e-5
        assert losses(rank["runs"][name]) == pytest.approx(losses(alone), abs=1e-5)


@pytest.mark.parametrize("name", cases.QUICK_PRESETS)
def test_one_step_has_the_gradient_and_the_metrics_of_whole_rows(name, pair):
    expect_step([rank["presets"][name] for rank in pair], cases.preset(name, World()))


@pytest.mark.parametrize("name", cases.MODELS)
def test_windows_soft_caps_and_few_key_heads_are_those_of_whole_rows(name, pair):
    expect_step([rank["models"][name] for rank in pair], cases.model(name, World()))


@pytest.mark.parametrize("name", cases.TEACHERS)
def test_a_teacher_of_whole_rows_or_of_shared_ones_teaches_as_in_one_process(name, pair):
    found, reported = cases.teacher(name, World())
    assert any(key.startswith("teacher/") for key in reported)
    expect_step([rank["teachers"][name] for rank in pair], (found, reported))


@pytest.mark.parametrize("name", ["grpo", "ppo", cases.SEPARATE])
def test_a_split_model_shares_out_tokens_too(name, pair):
    expect_step([rank["split"][name] for rank in pair], cases.preset(name, World()))


@pytest.mark.parametrize("kind", cases.QUICK_MEDIA)
def test_images_and_sounds_in_prompts_have_the_gradient_of_whole_rows(kind, pair):
    expect_step([rank["media"][kind] for rank in pair], cases.media(kind, World()))


@pytest.mark.parametrize("is_replayed", [False, True])
def test_experts_their_loads_and_their_replay_are_those_of_whole_rows(is_replayed, pair):
    expected = cases.experts(is_replayed, World())
    assert {"aux_loss", "experts/max_load", "experts/entropy"} <= expected[1].keys()
    assert not is_replayed or expected[1]["experts/changed"] > 0.5
    expect_step([rank["experts"][is_replayed] for rank in pair], expected)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_process_without_a_token_that_predicts_something_keeps_pace(checkpoints, pair):
    expect_step([rank["single"][checkpoints] for rank in pair], cases.single(World(), checkpoints), 1e-5)


@pytest.mark.parametrize("name", ["plain", "split"])
def test_a_run_ends_with_the_weights_of_one_process(name, pair, tmp_path):
    expect_run(name, pair, tmp_path)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_two_groups_of_two_share_out_rows_and_tokens(name, four):
    expect_step([rank["presets"][name] for rank in four], cases.preset(name, World()))


def test_two_groups_of_two_replay_experts(four):
    gradient, metrics = cases.experts(True, World())
    for rank in four:  # loads are reported as those of the fullest micro-batch, and processes of two groups have others
        assert apart(rank["experts"][True][0], gradient) <= 1e-6
        assert rank["experts"][True][1]["aux_loss"] == pytest.approx(metrics["aux_loss"], rel=1e-6)


def test_two_groups_of_two_with_a_split_model(four):
    expect_step([rank["split"]["grpo"] for rank in four], cases.preset("grpo", World()))


@pytest.mark.parametrize("kind", cases.QUICK_MEDIA)
def test_two_groups_of_two_with_a_split_model_and_media_in_some_rows(kind, four):
    expect_step([rank["media"][kind] for rank in four], cases.media(kind, World()))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", cases.MEDIA)
def test_every_kind_of_media_has_the_gradient_of_whole_rows(kind, every):
    expect_step([rank["media"][kind] for rank in every], cases.media(kind, World()))


@pytest.mark.nightly
@pytest.mark.parametrize("name", cases.PRESETS)
def test_one_step_of_every_preset(name, every):
    expect_step([rank["presets"][name] for rank in every], cases.preset(name, World()))


@pytest.mark.nightly
@pytest.mark.parametrize("name", cases.RUNS)
def test_every_kind_of_run_ends_with_the_weights_of_one_process(name, every, tmp_path):
    expect_run(name, every, tmp_path)
