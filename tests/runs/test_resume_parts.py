"""What a resume puts back by name (adapters, callbacks of one class), and options of the optimizer that are others since."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as schedules
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from covey import GRPOConfig, GRPOTrainer
from covey.config import checks
from covey.errors import ModelError
from covey.learner.optimizer import follow_options, lower_rates, options_of, schedule_of
from kit import tiny_model, tiny_tokenizer


def trainer(folder: Path, model: Any = None, callbacks: Any = None, **options: Any) -> GRPOTrainer:
    usual = {"max_steps": 2, "save_steps": 2, "learning_rate": 1e-3, "max_completion_length": 4}
    return GRPOTrainer(
        model=tiny_model() if model is None else model,
        processing_class=tiny_tokenizer(),
        reward_funcs=lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has"]}),
        callbacks=callbacks,
        args=GRPOConfig(
            output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, num_generations=2,
            per_device_train_batch_size=2, **{**usual, **options},
        ),
    )  # fmt: skip


def test_an_adapter_of_another_name_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = lambda: get_peft_model(tiny_model(), lora, adapter_name="mine")
    torch.manual_seed(0)
    whole = trainer(tmp_path / "whole", adapted(), max_steps=3)
    whole.train()
    torch.manual_seed(1)
    again = trainer(tmp_path / "again", adapted(), max_steps=3)
    again.train(str(tmp_path / "whole" / "checkpoint-2"))
    assert again.state.global_step == 3
    theirs = dict(again.model.named_parameters())
    assert all(torch.equal(theirs[name], value) for name, value in whole.model.named_parameters())


def test_the_speed_of_a_resumed_run_counts_its_own_steps(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    metrics = trainer(tmp_path, max_steps=3).train(str(tmp_path / "checkpoint-2")).metrics
    assert round(metrics["train_steps_per_second"] * metrics["train_runtime"]) == 1
    assert round(metrics["train_samples_per_second"] * metrics["train_runtime"]) == 2


def of_two_types() -> Any:
    """Weights of bfloat16 with norms of float32, as libraries leave them that keep the norms exact."""
    model = tiny_model().to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = weight.data.float()
    return model


@pytest.mark.filterwarnings("ignore:Completions are written by plain transformers")
def test_weights_of_several_types_are_trained_under_bf16_and_resumed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "processor_has_bfloat16", lambda: True)  # torch computes it everywhere, slowly
    whole = trainer(tmp_path / "whole", of_two_types(), max_steps=3, bf16=True, learning_rate=1e-2)
    whole.train()
    again = trainer(tmp_path / "again", of_two_types(), max_steps=3, bf16=True, learning_rate=1e-2)
    again.train(str(tmp_path / "whole" / "checkpoint-2"))
    theirs = dict(again.model.named_parameters())
    norm = dict(whole.model.named_parameters())["model.norm.weight"]
    assert norm.dtype == torch.float32
    assert not torch.equal(norm, norm.to(torch.bfloat16).float()), "a norm that bfloat16 cannot hold"
    assert all(torch.equal(theirs[name], value) for name, value in whole.model.named_parameters())


@pytest.mark.filterwarnings("ignore:Completions are written by plain transformers")
def test_weights_of_several_types_that_do_not_compute_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"torch.bfloat16 and torch.float32, which do not compute together .* Set bf16"
    ):
        trainer(tmp_path, of_two_types(), bf16=False).train()


def test_a_callback_that_ends_an_epoch_is_warned_once_that_epochs_are_not_ended(tmp_path: Path, caplog: Any) -> None:
    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = True

    run = trainer(tmp_path, callbacks=[Ends()])
    run.train()
    assert run.state.global_step == 2
    assert caplog.text.count("control.should_epoch_stop, which has no effect") == 1


class Counter(TrainerCallback, ExportableState):
    def __init__(self, by: int) -> None:
        self.by, self.count = by, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += self.by

    def state(self) -> dict[str, Any]:
        return {"args": {"by": self.by}, "attributes": {"count": self.count}}


@pytest.mark.slow
def test_each_of_several_callbacks_of_one_class_gets_its_own_state(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[Counter(1), Counter(10)]).train()
    resumed = [Counter(1), Counter(10)]
    trainer(tmp_path, callbacks=resumed, max_steps=3).train(resume_from_checkpoint=True)
    assert [callback.count for callback in resumed] == [3, 30]


ADAM = {"weight_decay": 0.25, "adam_beta1": 0.5, "adam_epsilon": 1e-4}


def resumed(folder: Path, **options: Any) -> GRPOTrainer:
    elsewhere = folder.with_name("_".join(["again", *options]))
    one = trainer(elsewhere, **{"max_steps": 3, "logging_steps": 1, "lr_scheduler_type": "constant", **options})
    one.train(str(folder / "checkpoint-2"))
    return one


def rates(one: GRPOTrainer) -> list[float]:
    return [entry["learning_rate"] for entry in one.state.log_history if "learning_rate" in entry and entry["step"] > 2]


class Lowered(TrainerCallback):
    """Halves the learning rate, as an alert may."""

    one: GRPOTrainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            lower_rates(self.one._running.learner.optimizer, self.one._running.learner.scheduler, 0.5)


@pytest.mark.slow
def test_options_of_the_optimizer_act_after_a_resume_where_they_are_others_than_before(tmp_path: Path) -> None:
    lowered = Lowered()
    lowered.one = trainer(tmp_path / "run", callbacks=[lowered], lr_scheduler_type="constant")
    lowered.one.train()
    assert rates(resumed(tmp_path / "run")) == [5e-4]
    one = resumed(tmp_path / "run", learning_rate=4e-3, **ADAM)
    assert rates(one) == [2e-3]
    with_decay, without = one.optimizer.param_groups
    assert (with_decay["weight_decay"], with_decay["betas"], with_decay["eps"]) == (0.25, (0.5, 0.999), 1e-4)
    assert (without["weight_decay"], without["betas"], without["lr"]) == (0.0, (0.5, 0.999), 2e-3)
    assert rates(resumed(tmp_path / "run", learning_rate=4e-3, lr_scheduler_type="linear", max_steps=4)) == [1e-3, 5e-4]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)) for _ in range(2)], [3]
    ),
    "chained": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ExponentialLR(optimizer, 0.9), schedules.LinearLR(optimizer, 0.5, 1.0, 4)]
    ),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 1e-2, total_steps=8),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=2),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 4, eta_min=4e-3),
    "warm restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 3, eta_min=4e-3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lowered_rate_stays_lowered_by_its_factor_under_every_schedule(name: str) -> None:
    def rates_of(factor: float) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2, momentum=0.9)
        schedule, seen = SCHEDULES[name](optimizer), []
        for step in range(6):
            if step == 2:
                lower_rates(optimizer, schedule, factor)
                assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return seen

    plain, halved = rates_of(1.0), rates_of(0.5)
    assert halved[:2] == plain[:2]
    assert halved[2:] == pytest.approx([rate / 2 for rate in plain[2:]])


def test_a_run_that_is_made_longer_has_the_learning_rate_of_the_longer_schedule_at_once(tmp_path: Path) -> None:
    trainer(tmp_path / "run", lr_scheduler_type="linear").train()
    assert rates(resumed(tmp_path / "run", lr_scheduler_type="linear", max_steps=4)) == [5e-4, 2.5e-4]


def test_a_learning_rate_of_0_can_be_raised(tmp_path: Path) -> None:
    trainer(tmp_path / "run", learning_rate=0.0, lr_scheduler_type="constant").train()
    assert rates(resumed(tmp_path / "run", learning_rate=1e-3)) == [1e-3]


def composed(kind: str, rate: float) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.5)]
    whole = schedules.SequentialLR(optimizer, parts, [3]) if kind == "sequential" else schedules.ChainedScheduler(parts)
    return optimizer, whole


@pytest.mark.parametrize("kind", ["sequential", "chained"])
@pytest.mark.parametrize("steps", [2, 5])
def test_a_schedule_that_is_made_of_others_follows_a_new_learning_rate(kind: str, steps: int) -> None:
    def rates_of(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    before, now = composed(kind, 1.0), composed(kind, 3.0)
    saved = {"groups": options_of(before[0]), "factors": schedule_of(before[1])}
    options = options_of(now[0])
    rates_of(*before, steps)
    for mine, theirs in zip(now, before, strict=True):
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    follow_options(*now, saved, options)
    assert rates_of(*now, 4) == pytest.approx([3 * rate for rate in rates_of(*before, 4)])
