"""NaN, infinities and spikes never reach the weights; the run goes on, goes back, or stops, as it was told."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import During, lines, options, spoil_gradient, trainer, weights
from transformers import TrainerCallback

from covey import algorithms as alg
from covey.errors import NumericsError
from covey.learner.update_guard import GuardPolicy, UpdateGuard
from covey.training.recovery import bad_batch
from covey.types import Last, Sum
from kit import rest_nightly


class Watch(TrainerCallback):
    """Weights, optimizer and schedule after every step."""

    def __init__(self, one: Any) -> None:
        self.one, self.seen = one, {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        moments = [value["exp_avg"].clone() for value in self.one.optimizer.state.values()]
        self.seen[state.global_step] = (weights(self.one), moments, self.one.lr_scheduler.last_epoch)


def spoiled(folder: Path, how: str, steps: list[int], **changed: Any) -> Any:
    """A trainer in whose `steps` a real number of the kind `how` is not finite."""
    if how == "loss":
        active: list[bool] = []

        def objective(tokens: Any) -> torch.Tensor:
            loss = -tokens.logp * tokens.advantages
            return loss * math.nan if active else loss

        one = trainer(folder, algorithm=alg.grpo().replace(objective=objective), **changed)
        one.add_callback(During(steps, lambda: active.append(True), active.clear))
        return one
    one = trainer(folder, **({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 100} | changed))
    if how == "reference":
        spoil_reference(one, steps)
    elif how == "policy":
        spoil_policy(one, steps)
    else:
        spoil_gradient(one, steps, math.nan if how == "gradient" else math.inf)
    return one


def spoil_reference(one: Any, steps: list[int]) -> None:
    """A weight of the reference is NaN while it measures."""
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start() -> None:
        reference = one._parts.learner.reference
        reference.moves += 1  # told, or the next save would end the run for it
        weight = next(reference.policy.model.parameters()).data
        held.append((weight, weight.clone()))
        weight.fill_(math.nan)

    def stop() -> None:
        for weight, before in held:
            weight.copy_(before)
            one._parts.learner.reference.moves += 1
        held.clear()

    one.add_callback(During(steps, start, stop))


def spoil_policy(one: Any, steps: list[int]) -> None:
    """The learner's log-probabilities are NaN; the sampler reads the weights itself, so that its own are not."""
    active: list[bool] = []
    norm = one.model.model.norm
    norm.register_forward_hook(lambda module, given, out: out * math.nan if active and torch.is_grad_enabled() else out)
    one.add_callback(During(steps, lambda: active.append(True), active.clear))


@pytest.mark.parametrize("how", rest_nightly(["loss", "gradient", "policy", "reference", "infinite gradient"], 2))
def test_what_is_not_finite_changes_neither_weights_nor_optimizer_nor_schedule(how: str, tmp_path: Path) -> None:
    one = spoiled(tmp_path / "run", how, [3])
    watch = Watch(one)
    one.add_callback(watch)
    assert one.train().global_step == 6
    before, after = watch.seen[2], watch.seen[3]
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert before[2] == after[2]
    assert bool(weights(one).isfinite().all())
    assert not torch.equal(watch.seen[6][0], after[0]), "it goes on learning"
    logged = next(line for line in lines(tmp_path / "run") if line["step"] == 3)
    assert "nan" in logged["non_finite"].values() or "inf" in logged["non_finite"].values(), "the log shows it"
    told = [line for line in lines(tmp_path / "run", "events.jsonl") if line["kind"] == "non_finite_step"]
    assert [line["step"] for line in told] == [3]


def test_log_probabilities_that_the_sampler_did_not_know_change_no_weight_into_nan(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run")

    def spoil() -> None:
        sampler = one._parts.sampler
        real = sampler.sample

        def sample(*given: Any) -> Any:
            for group in real(*given):
                spoiled = [replace(c, logprobs=torch.full_like(c.logprobs, math.nan)) for c in group.completions]
                yield replace(group, completions=tuple(spoiled))

        sampler.sample = sample

    one.add_callback(During([3], spoil, lambda: vars(one._parts.sampler).pop("sample", None)))
    assert one.train().global_step == 6
    assert bool(weights(one).isfinite().all())
    logged = next(line for line in lines(tmp_path / "run") if line["step"] == 3)
    assert "sampling/sampling_logp_difference/max" not in logged, "what nobody knows is not shown as a number"
    assert math.isfinite(logged["loss"])


@pytest.mark.slow
def test_a_batch_that_was_left_out_is_kept_and_can_be_trained_on_again(tmp_path: Path) -> None:
    one = spoiled(tmp_path / "run", "loss", [3])
    one.train()
    groups, said = bad_batch(tmp_path / "run" / "bad_steps" / "step-000003")
    assert said["step"] == 3
    assert math.isnan(said["metrics"]["loss"])
    assert sum(group.size for group in groups) == 8
    again = one._parts.learner.step(groups, alg.grpo(), 3)
    assert math.isfinite(again["loss"]), "the same batch, without the fault, is fine"


def test_after_three_in_a_row_the_run_stops_with_exit_code_70_and_a_checkpoint(tmp_path: Path) -> None:
    one = spoiled(tmp_path / "run", "gradient", [3, 4, 5, 6], save_steps=100)
    with pytest.raises(NumericsError, match=r"3 updates in a row were left out at step 5.*bad_steps") as caught:
        one.train()
    assert caught.value.exit_code == 70
    assert (tmp_path / "run" / "checkpoint-5").is_dir()
    assert len(list((tmp_path / "run" / "bad_steps").iterdir())) == 3


def test_stop_stops_at_the_first(tmp_path: Path) -> None:
    one = spoiled(tmp_path / "run", "gradient", [2], on_bad_numbers="stop")
    with pytest.raises(NumericsError, match="on_bad_numbers='stop'"):
        one.train()


@pytest.mark.filterwarnings("ignore:.*goes on from step")
def test_a_run_goes_back_to_the_last_good_checkpoint_with_half_the_learning_rate(tmp_path: Path) -> None:
    one = spoiled(tmp_path / "run", "gradient", [4, 5], on_bad_numbers="roll_back", bad_steps_limit=2, save_steps=3)
    watch = Watch(one)
    one.add_callback(watch)
    rates: list[tuple[int, float]] = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append((state.global_step + 1, one.optimizer.param_groups[0]["lr"]))

    one.add_callback(Rates())
    assert one.train().global_step == 6
    rows = lines(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6], "each step is recorded once"
    back = [line for line in lines(tmp_path / "run", "events.jsonl") if line["kind"] == "rolled_back"]
    assert [(line["step"], line["details"]["from_step"]) for line in back] == [(3, 5)]
    whole = trainer(tmp_path / "whole", beta=0.1, sync_ref_model=True, ref_model_sync_steps=100)
    planned: list[float] = []

    class Planned(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            planned.append(whole.optimizer.param_groups[0]["lr"])

    whole.add_callback(Planned())
    whole.train()
    assert [step for step, _ in rates] == [1, 2, 3, 4, 5, 6], "the spoiled updates were never made"
    assert [rate for _, rate in rates] == pytest.approx([*planned[:3], *(rate / 2 for rate in planned[3:])])
    aside = set(back[0]["details"]["set_aside"])
    assert aside
    entries = [entry["step"] for entry in one.state.log_history if "loss" in entry]
    assert entries == [2, 4, 6]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*goes on from step")
def test_going_back_too_often_stops_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    limits = {"on_bad_numbers": "roll_back", "bad_steps_limit": 1, "roll_backs_limit": 2}
    one = trainer(folder, **limits)
    spoil_gradient(one, [3, 3, 3], math.nan)
    with pytest.raises(NumericsError, match="after 2 returns to a checkpoint"):
        one.train()
    back = [line["details"] for line in lines(folder, "events.jsonl") if line["kind"] == "rolled_back"]
    assert [(one["from_step"], one["to_step"], one["factor"]) for one in back] == [(3, 2, 0.5), (3, 1, 0.25)]


def test_without_a_checkpoint_to_go_back_to_the_run_says_so(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run", on_bad_numbers="roll_back", bad_steps_limit=1, save_strategy="no")
    spoil_gradient(one, [3], math.nan)
    with pytest.raises(NumericsError, match="no good checkpoint of step 2 or before"):
        one.train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*goes on from step")
def test_a_callback_may_ask_to_go_back(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run")
    asked: list[int] = []

    class Ask(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4 and not asked:
                asked.append(4)
                one._parts.session.ask_roll_back("a person did not like it.")

    one.add_callback(Ask())
    one.train()
    back = [line for line in lines(tmp_path / "run", "events.jsonl") if line["kind"] == "rolled_back"]
    assert len(back) == 1
    assert "a person did not like it" in back[0]["said"]


def healthy(guard: UpdateGuard, steps: int, seed: int = 0, norm: float = 1.0) -> int:
    """Steps like a real run's: log-normal gradient norms, a KL that grows. Returns how many were not left alone."""
    draw = random.Random(seed)
    count = 0
    for step in range(steps):
        values = {
            "grad_norm": norm * math.exp(draw.gauss(0, 0.5)),
            "kl": 1e-3 * (step + 1) * math.exp(draw.gauss(0, 0.3)),
        }
        verdict = guard.check({"loss": Sum(0.1), **{n: Last(v) for n, v in values.items()}}, step)
        count += bool(verdict.events)
    return count


def spike(guard: UpdateGuard, norm: float = 1e4, kl: float = 0.01) -> Any:
    return guard.check({"loss": Sum(0.1), "grad_norm": Last(norm), "kl": Last(kl)}, 101)


def test_healthy_runs_are_left_alone() -> None:
    assert sum(healthy(UpdateGuard(), 300, seed) for seed in range(20)) <= 1


@pytest.mark.parametrize(
    "rung, is_left_out, clips",
    [("log", False, False), ("clip", False, True), ("skip", True, False), ("roll_back", True, False)],
)
def test_a_gradient_ten_thousand_times_the_usual_gets_what_was_asked_for(rung, is_left_out, clips) -> None:
    guard = UpdateGuard(GuardPolicy(on_spike=rung))
    healthy(guard, 100)
    verdict = spike(guard)
    assert verdict.is_left_out == is_left_out
    assert (verdict.max_norm < 2.0) == clips
    assert "grad_norm 1e+04 where" in verdict.events[0].said
    assert spike(guard).events, "a spike does not become what is usual"


def test_a_jump_of_the_kl_is_a_spike_and_its_slow_growth_is_not() -> None:
    guard = UpdateGuard(GuardPolicy(on_spike="skip"))
    assert healthy(guard, 300) == 0
    assert spike(guard, norm=1.0, kl=300.0).is_left_out


def test_a_guard_that_is_saved_decides_as_before() -> None:
    one, other = UpdateGuard(GuardPolicy(on_spike="clip")), UpdateGuard(GuardPolicy(on_spike="clip"))
    healthy(one, 100)
    other.load_state_dict(one.state_dict())
    assert spike(one) == spike(other)


def test_a_level_that_moved_for_good_is_learnt_when_spikes_are_only_skipped() -> None:
    guard = UpdateGuard(GuardPolicy(on_spike="skip", bad_steps_limit=3))
    healthy(guard, 100)
    for bad in (1, 2, 3):
        assert guard.next_action(bad, bad, 0, spike(guard).events) == "go_on"
    assert not spike(guard).events


def test_an_overflow_of_float16_is_not_a_bad_number_until_the_scale_is_one() -> None:
    guard = UpdateGuard()
    overflow = {"loss": Sum(0.1), "grad_norm": Last(math.inf)}
    assert [event.kind for event in guard.check(overflow, 1, loss_scale=65536.0).events] == ["float16_overflow"]
    assert [event.kind for event in guard.check(overflow, 1, loss_scale=1.0).events] == ["non_finite_step"]


@pytest.mark.slow
@pytest.mark.parametrize("rung", rest_nightly(["roll_back", "clip", "log", "skip"], 1))
@pytest.mark.filterwarnings("ignore:.*goes on from step")
def test_a_real_gradient_times_ten_thousand_in_a_real_run(rung: str, tmp_path: Path) -> None:
    rules = {"on_spike": rung, "bad_steps_limit": 1, "max_steps": 27, "save_steps": 5}
    one = trainer(tmp_path / "run", learning_rate=1e-4, max_grad_norm=0.0, **rules)
    watch = Watch(one)
    one.add_callback(watch)
    spoil_gradient(one, [25], 1e6)
    one.train()
    kinds = [line["kind"] for line in lines(tmp_path / "run", "events.jsonl") if line["step"] in (25, 20)]
    assert (
        kinds
        == {
            "log": ["spike"],
            "clip": ["spike"],
            "skip": ["spike_skipped"],
            "roll_back": ["spike_skipped", "rolled_back"],
        }[rung]
    )
    if rung == "skip":
        assert torch.equal(watch.seen[24][0], watch.seen[25][0])


@pytest.mark.parametrize(
    "wrong", [{"on_bad_numbers": "ignore"}, {"on_spike": "rollback"}, {"bad_steps_limit": 0}, {"spike_threshold": 0}]
)
def test_rungs_that_do_not_exist_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        options(tmp_path, **wrong)


def test_a_verdict_is_the_same_on_every_process_that_holds_the_same_metrics() -> None:
    verdicts = []
    for _ in range(2):
        guard = UpdateGuard(GuardPolicy(on_spike="clip"))
        healthy(guard, 60)
        verdicts.append(replace(spike(guard)))
    assert verdicts[0] == verdicts[1]
