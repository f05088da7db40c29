"""`covey why`: a recorded step is made again exactly, planted causes are named first, healthy steps blame nothing."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import planted
import pytest
import torch

from covey.cli import main
from covey.doctor.why import causes, recorded, slices
from covey.errors import RunFolderError
from covey.rewards import RewardSpec
from covey.runs import rollouts
from kit import group


def asked(capsys, run: Path, step: int) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["why", str(run), "--step", str(step), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


NIGHT = pytest.mark.nightly
IN_CI = [("reward", 1)]
AT_NIGHT = [(kind, seed) for kind in planted.PLANTED for seed in range(1, 4) if (kind, seed) not in IN_CI]


@pytest.mark.parametrize(("kind", "seed"), [*IN_CI, *(pytest.param(*one, marks=NIGHT) for one in AT_NIGHT)])
@pytest.mark.slow
def test_a_planted_cause_is_named_first(kind: str, seed: int, tmp_path: Path, capsys) -> None:
    step = planted.PLANTED[kind](tmp_path / "run", seed)
    found = asked(capsys, tmp_path / "run", step)
    assert found["troubles"]
    assert found["changes"][0]["kind"] == kind, found
    assert found["changes"][0]["named"]


@pytest.mark.parametrize(
    ("sums", "heavy"),
    [
        ([8.0, 0.1, 0.1, 0.1, 0.1], [0]),
        ([8.0, 0.1, 9.0, 0.1, 0.1, 0.0], [0, 2]),
        ([8.0, 9.0, 7.0, 0.1, 0.1], []),  # most of them: they do not stand out
        ([8.0, 0.1, 0.1, 0.0, 0.0], []),  # three with signal are too few
    ],
)
def test_groups_that_outweigh_the_others_are_left_out_together(sums: list[float], heavy: list[int]) -> None:
    groups = [SimpleNamespace(advantages=torch.tensor([one / 2, -one / 2])) for one in sums]
    assert causes._heavy(SimpleNamespace(groups=[*groups, SimpleNamespace(advantages=None)])) == heavy


def _remedy(left: dict[str, float], **was: float) -> causes.Remedy:
    """Of a step of eight groups with the troubles `was`, all with limit 1, and a change that leaves `left` of them."""
    effect = lambda values: SimpleNamespace(
        moved=np.zeros(8), **{name: np.full(8, one) for name, one in values.items()}
    )
    troubles = [causes.Trouble(said=name, measure=lambda e, n=name: getattr(e, n), limit=1.0) for name in was]
    change = causes.Change(kind="any", said="", apply=lambda g, a: (g, a, 1.0, None))
    return causes._remedy(change, troubles, effect(was), effect(left))


def test_of_two_troubles_with_causes_of_their_own_each_change_is_named_for_the_one_that_it_removes() -> None:
    """Stale completions at a high learning rate: without them the batch is smaller and the update larger."""
    was = {"stale": 5.0, "far": 3.0}
    fresh, slower, neither = ({"stale": 0.5, "far": 4.0}, {"stale": 5.0, "far": 0.9}, {"stale": 4.0, "far": 2.5})
    assert [_remedy(left, **was).removes for left in (fresh, slower, neither)] == [(0,), (1,), ()]
    assert [_remedy(left, **was).share for left in (fresh, slower)] == [0.5, 0.5]
    assert _remedy(neither, **was).share == 0.25


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_healthy_step_is_made_again_exactly_and_blames_nothing(seed: int, tmp_path: Path, capsys) -> None:
    step = planted.healthy(tmp_path / "run", seed)
    found = asked(capsys, tmp_path / "run", step)
    assert math.isclose(found["grad_norm"]["replayed"], found["grad_norm"]["recorded"], rel_tol=1e-5)
    assert found["troubles"] == []
    shutil.rmtree(tmp_path / "run" / f"checkpoint-{step - 1}")
    assert main(["why", str(tmp_path / "run"), "--step", str(step)]) == 2
    assert f"lacks checkpoint-{step - 1}" in (said := capsys.readouterr().err)
    assert "It has both for step 2" in said
    assert main(["why", str(tmp_path / "run"), "--step", "99"]) == 2
    assert f"--step 99: {tmp_path / 'run'} has taken" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_that_rewards_bring_themselves_are_those_of_the_run(tmp_path: Path) -> None:
    rewards = [RewardSpec(name="right", call=planted.reward, weight=3.0), planted.shows_work]
    planted.made(tmp_path, 1, rewards, max_steps=2, per_device_train_batch_size=16)
    step = recorded.load(tmp_path, 2)
    assert step.weights.tolist() == [3.0, 1.0]
    assert step.can_judge


@pytest.mark.slow
def test_a_weight_that_is_a_function_is_that_which_the_step_logged(tmp_path: Path) -> None:
    options = {"max_steps": 2, "per_device_train_batch_size": 16, "reward_weights": [lambda step: 2.0 + step, 1.0]}
    planted.made(tmp_path, 1, [planted.reward, planted.shows_work], **options)
    step = recorded.load(tmp_path, 2)
    assert step.weights.tolist() == [3.0, 1.0]
    assert step.can_judge
    log = tmp_path / "metrics.jsonl"
    log.write_text(log.read_text().replace("/weight", "/was"))
    with pytest.raises(RunFolderError, match="did not log rewards/reward/weight at step 2"):
        recorded.load(tmp_path, 2)


@pytest.mark.nightly
def test_a_step_of_an_adapter_is_made_again_exactly(tmp_path: Path, capsys) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    rate = {"learning_rate": 0.1, "max_steps": 2, "per_device_train_batch_size": 32}
    step = planted.made(tmp_path / "run", 1, peft_config=lora, **rate)
    found = asked(capsys, tmp_path / "run", step)
    assert math.isclose(found["grad_norm"]["replayed"], found["grad_norm"]["recorded"], rel_tol=1e-5)
    assert found["changes"][0]["kind"] == "learning_rate"
    assert found["changes"][0]["named"]


def _noisy_slice(sign: float) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """Cosines and advantages of 20 groups of 8 that one direction pays for, with noise; the last five for `sign` times it."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20, 8, 10))
    features -= features.mean(1, keepdims=True)
    paid = features[..., 0] * np.where(np.arange(20) < 15, 1.0, sign)[:, None] + 0.3 * rng.normal(size=(20, 8))
    flat = features.reshape(160, 10)
    return flat @ flat.T, list(paid - paid.mean(1, keepdims=True))


def test_regression_on_other_groups_tells_a_slice_that_is_paid_the_other_way() -> None:
    kernel, advantages = _noisy_slice(-1.0)
    scores = np.array(
        [e @ a / np.linalg.norm(a) for e, a in zip(slices._predicted(kernel, advantages), advantages, strict=True)]
    )
    assert (scores[:15] > 0).all()
    assert (scores[15:] < 0).all()
    assert slices._p_value(scores, range(15, 20)) < 0.001
    assert slices._p_value(scores, range(5)) > 0.1
    kernel, advantages = _noisy_slice(1.0)
    scores = np.array(
        [e @ a / np.linalg.norm(a) for e, a in zip(slices._predicted(kernel, advantages), advantages, strict=True)]
    )
    assert (scores > 0).all()


def test_predictions_leave_the_own_group_out() -> None:
    kernel, advantages = _noisy_slice(-1.0)
    ridge = np.trace(kernel) / len(kernel)
    others = slice(8, None)
    weights = np.linalg.solve(kernel[others, others] + ridge * np.eye(152), np.concatenate(advantages[1:]))
    np.testing.assert_allclose(slices._predicted(kernel, advantages)[0], kernel[:8, others] @ weights, atol=1e-8)


def test_what_is_missing_is_told_in_a_sentence(tmp_path: Path, capsys) -> None:
    for words, said in (
        (["--step", "3"], "needs a run and a step"),
        ([str(tmp_path)], "needs a run and a step"),
        ([str(tmp_path), "--step", "3"], "holds no run.json"),
    ):
        assert main(["why", *words]) == 2
        assert said in capsys.readouterr().err


def test_advantages_by_token_are_those_that_were_recorded() -> None:
    one, by_token = group(["a", "abc"], rewards=[[1.0], [0.0]]), torch.tensor([[0.5, 0.0, 0.0], [-1.0, 0.0, 0.25]])
    for advantages in (by_token, torch.tensor([0.5, -0.25])):
        table = rollouts.table_of(1, [dataclasses.replace(one, advantages=advantages)], ["math"])
        (read,) = recorded.groups_of(table.to_pylist(), ["math"])
        assert torch.equal(read.advantages, advantages)
