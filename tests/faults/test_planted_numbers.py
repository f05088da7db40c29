"""NaN, infinities and absurd values planted everywhere: the weights end finite or the run ends with one sentence, and no checkpoint holds them."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small_runs import lines, trainer
from transformers import TrainerCallback

from covey import algorithms as alg
from covey.errors import NumericsError
from covey.learner.soundness import are_sound, fault_of, state_fault
from covey.runs import checkpoint, checksums
from kit import rest_nightly, tiny_model

EARLY = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step")
"""Events at which `global_step` still counts the steps before."""


def plant(event: str, step: int, act: Callable[[Any], None], *, always: bool = False) -> Any:
    """A callback that does `act(trainer)` at the event of that step, once or every time; its trainer is set later."""

    def at(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + (event in EARLY) == step and (always or not self.done):
            self.done = True
            with torch.no_grad():
                act(self.one)

    return type("Plant", (TrainerCallback,), {event: at, "done": False})()


def weight(value: float) -> Callable[[Any], None]:
    return lambda one: trained(one)[0].view(-1)[:3].fill_(value)


def trained(one: Any) -> list[torch.Tensor]:
    return [p for p in one.model.parameters() if p.requires_grad]


def moment(value: float, name: str) -> Callable[[Any], None]:
    """One value of the optimizer's state of every parameter, or the text of a key that it has instead."""

    def act(one: Any) -> None:
        states = [state[name] for state in one.optimizer.state.values() if name in state and state[name] is not None]
        assert states, f"no {name} to spoil"
        for state in states:
            state.view(-1)[:1] = value

    return act


def rate(value: float, name: str = "lr") -> Callable[[Any], None]:
    return lambda one: [group.__setitem__(name, value) for group in one.optimizer.param_groups]


def gradient(value: float) -> Callable[[Any], None]:
    return lambda one: next(p.grad for p in trained(one) if p.grad is not None).fill_(value)


def critic(one: Any) -> None:
    one._parts.learner.critic.parameters()[0].fill_(math.nan)


def reference(one: Any) -> None:
    next(iter(one._parts.learner.reference.weights().values())).view(-1)[0] = math.nan
    one._parts.learner.reference.moves += 1  # as its own rule would


def check(one: Any, run: Path, *, ends: bool | None = None) -> str | None:
    """Train, and judge the end. `ends`: it must end with an error, or must not; returns what was said."""
    said = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            one.train()
        except NumericsError as error:
            said = str(error)
    assert ends in (None, said is not None), said
    assert said is not None or all(bool(p.isfinite().all()) for p in one.model.parameters())
    assert said is not None or one.state.global_step == one.args.max_steps
    for saved in checkpoint.checkpoints(run):
        assert checksums.problems(saved) == []
        assert_finite(saved)
    return said


def assert_finite(saved: Path) -> None:
    for file in saved.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            for name in held.keys():  # noqa: SIM118 - it is no mapping
                value = held.get_tensor(name)
                assert not value.is_floating_point() or bool(value.float().isfinite().all()), f"{file}: {name}"
    tree = checkpoint.load_state(saved)
    assert not tree or state_fault(tree, [str(i) for i in range(999)]) is None


EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_save")
ANYWHERE = [
    *rest_nightly([(event, 3) for event in EVENTS], [("on_step_begin", 3)]),
    *[
        pytest.param(event, 6, marks=pytest.mark.slow if event == "on_step_end" else pytest.mark.nightly)
        for event in EVENTS
    ],
    *rest_nightly([("on_evaluate", 4), ("on_log", 4)], 0),
]


@pytest.mark.parametrize("event, step", ANYWHERE)
def test_a_weight_that_becomes_nan_at_any_event_sends_the_run_back(event: str, step: int, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if event == "on_evaluate":
        from small_runs import ROWS, Dataset

        more = {"eval_dataset": Dataset.from_list(ROWS[:4]), "eval_strategy": "steps", "eval_steps": 2}
    planted = plant(event, step, weight(math.nan))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], **more)
    check(one, tmp_path / "run", ends=False)
    kinds = [line["kind"] for line in lines(tmp_path / "run", "events.jsonl")]
    assert kinds.count("rolled_back") == 1
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == [f"checkpoint-{n}" for n in range(1, 7)]


VALUES = rest_nightly([math.inf, -math.inf, 3e38, -1e30], [-1e30])


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("event", rest_nightly(["on_step_end", "on_pre_optimizer_step"], 1))
def test_a_weight_that_becomes_infinite_or_absurd_sends_the_run_back(value: float, event: str, tmp_path: Path) -> None:
    planted = plant(event, 3, weight(value))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted])
    check(one, tmp_path / "run", ends=False)


MOMENTS = [
    *[("adamw_torch", name, value) for name in ("exp_avg", "exp_avg_sq") for value in (math.nan, math.inf, -1.0, 1e38)],
    ("sgd", "momentum_buffer", math.nan),
    ("sgd", "momentum_buffer", 1e38),
    ("adafactor", "exp_avg_sq_row", math.nan),
    ("adafactor", "exp_avg_sq_row", -1.0),
    ("adagrad", "sum", -5.0),
    ("rmsprop", "square_avg", math.nan),
    ("lion_32bit", "state1", math.nan),
    ("adamw_8bit", "absmax2", math.nan),
    ("adamw_8bit", "absmax1", math.inf),
]


KINDS = (6, 15)
"""In CI a moment below zero, and one of 8 bits that is not a number; not a number is in a quick test."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim, name, value",
    rest_nightly(MOMENTS, [MOMENTS[i] for i in KINDS]),
)
@pytest.mark.parametrize("event", [pytest.param("on_pre_optimizer_step", marks=pytest.mark.nightly), "on_step_end"])
def test_a_moment_of_the_optimizer_that_is_none_never_reaches_a_checkpoint(optim, name, value, event, tmp_path) -> None:
    pytest.importorskip("bitsandbytes") if optim in ("lion_32bit", "adamw_8bit") else None
    planted = plant(event, 3, moment(value, name))
    more = {"optim_args": "momentum=0.9"} if optim == "sgd" else {}
    model = tiny_model("qwen2", hidden=64)  # layers that are large enough for a state in 8 bits
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], optim=optim, model=model, **more)
    check(one, tmp_path / "run", ends=False)


@pytest.mark.parametrize("event", rest_nightly(["on_step_end", "on_step_begin", "on_pre_optimizer_step"], 1))
@pytest.mark.parametrize("value", rest_nightly([math.nan, -1e-3, math.inf], 2))
def test_a_learning_rate_that_is_none_is_refused_at_the_step(event: str, value: float, tmp_path: Path) -> None:
    planted = plant(event, 3, rate(value), always=True)
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], save_steps=100)
    said = check(one, tmp_path / "run", ends=True)
    assert f"the optimizer's learning rate is {value:g}" in str(said)


@pytest.mark.parametrize(
    "name, value", rest_nightly([("betas", (0.9, math.nan)), ("weight_decay", math.nan), ("eps", math.nan)], 1)
)
def test_another_number_of_the_optimizer_that_is_none_is_refused_at_the_step(name, value, tmp_path: Path) -> None:
    planted = plant("on_pre_optimizer_step", 3, rate(value, name))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted])
    assert f"the optimizer's {name} is nan" in str(check(one, tmp_path / "run", ends=True))


@pytest.mark.parametrize("factor", rest_nightly([math.nan, -1.0, math.inf, 1e30], 1))
def test_a_schedule_that_gives_a_learning_rate_that_is_none_ends_the_run(factor: float, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor if step == 3 else 1.0)
    one = with_optimizer(tmp_path / "run", model, optimizer, schedule)
    check(one, tmp_path / "run", ends=True if factor != 1e30 else None)


def with_optimizer(run: Path, model: Any, optimizer: Any, schedule: Any = None) -> Any:
    from small_runs import ROWS, Dataset, options, reward_len

    from covey import GRPOTrainer
    from kit import tiny_tokenizer

    return GRPOTrainer(
        model=model,
        reward_funcs=reward_len,
        args=options(run),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tiny_tokenizer(),
        optimizers=(optimizer, schedule),
    )


class Careless(torch.optim.SGD):
    """Divides by zero in its third update."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.updates += 1
        if self.updates == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][-1].div_(0.0)


@pytest.mark.slow
def test_an_optimizer_of_the_users_own_that_makes_nan_sends_the_run_back(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    check(with_optimizer(tmp_path / "run", model, Careless(model.parameters(), lr=1e-3)), tmp_path / "run", ends=False)


@pytest.mark.parametrize("value", rest_nightly([math.nan, math.inf, 3e38], 1))
def test_a_gradient_that_a_callback_spoils_after_it_was_judged_sends_the_run_back(value: float, tmp_path: Path) -> None:
    planted = plant("on_pre_optimizer_step", 3, gradient(value))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted])
    check(one, tmp_path / "run", ends=False)


@pytest.mark.slow
@pytest.mark.parametrize("event", rest_nightly(["on_step_end", "on_optimizer_step", "on_step_begin"], 1))
def test_a_critic_that_becomes_nan_sends_the_run_back(event: str, tmp_path: Path) -> None:
    planted = plant(event, 3, critic)
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], algorithm="ppo")
    check(one, tmp_path / "run", ends=False)


@pytest.mark.slow
@pytest.mark.parametrize("event", rest_nightly(["on_step_end", "on_step_begin"], 1))
def test_a_reference_that_becomes_nan_never_reaches_a_checkpoint(event: str, tmp_path: Path) -> None:
    planted = plant(event, 3, reference)
    more = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 100}
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], **more)
    check(one, tmp_path / "run")


@pytest.mark.parametrize("event", rest_nightly(EVENTS[:4], ["on_step_end"]))
@pytest.mark.slow
@pytest.mark.parametrize("dropout", rest_nightly([0.0, 0.1], 1))
def test_an_adapter_that_becomes_nan_sends_the_run_back(event: str, dropout: float, tmp_path: Path) -> None:
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    planted = plant(event, 3, weight(math.nan))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], peft_config=adapter)
    check(one, tmp_path / "run", ends=False)


@pytest.mark.slow
@pytest.mark.parametrize("event", rest_nightly(["on_step_end", "on_pre_optimizer_step"], 1))
def test_bfloat16_weights_that_become_nan_send_the_run_back(event: str, tmp_path: Path) -> None:
    planted = plant(event, 3, weight(math.nan))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], model=tiny_model("qwen2").bfloat16())
    check(one, tmp_path / "run", ends=False)


@pytest.mark.slow
def test_a_forward_hook_that_writes_nan_into_a_weight_sends_the_run_back(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run")
    calls: list[int] = []

    def hook(module: Any, given: Any, out: Any) -> None:
        if torch.is_grad_enabled() and one.state.global_step == 2 and not calls:
            calls.append(1)
            module.weight.data[0] = math.nan

    one.model.model.norm.register_forward_hook(hook)
    check(one, tmp_path / "run", ends=False)


def test_a_buffer_that_is_saved_and_becomes_nan_never_reaches_a_checkpoint(tmp_path: Path) -> None:
    planted = plant("on_step_end", 3, lambda one: one.model.model.counts.fill_(math.nan))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], on_bad_numbers="stop")
    one.model.model.register_buffer("counts", torch.zeros(3))
    check(one, tmp_path / "run", ends=True)
    assert checkpoint.checkpoints(tmp_path / "run"), "those before are there"


def test_a_buffer_that_is_not_saved_costs_no_weight(tmp_path: Path) -> None:
    planted = plant("on_step_begin", 3, lambda one: one.model.model.rotary_emb.inv_freq.fill_(math.nan))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted])
    check(one, tmp_path / "run", ends=True)


@pytest.mark.parametrize("value", rest_nightly([math.nan, math.inf, 1e38], 1))
def test_an_objective_that_is_none_changes_no_weight(value: float, tmp_path: Path) -> None:
    bad = lambda tokens: -tokens.logp * tokens.advantages * value
    check(trainer(tmp_path / "run", algorithm=alg.grpo().replace(objective=bad)), tmp_path / "run", ends=True)


@pytest.mark.slow
def test_a_fault_that_comes_every_time_ends_the_run_with_one_sentence_after_the_returns_it_may_have(tmp_path) -> None:
    planted = plant("on_step_end", 4, weight(math.nan), always=True)
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted])
    said = check(one, tmp_path / "run", ends=True)
    assert "no checkpoint is made of it: the weight model.embed_tokens.weight holds NaN" in str(said)
    assert "ends after 2 returns to a checkpoint" in str(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", rest_nightly([{"save_strategy": "no"}, {"on_bad_numbers": "stop"}, {"save_steps": 100}], 2)
)
def test_without_a_checkpoint_or_with_stop_a_spoiled_weight_ends_the_run(more: dict[str, Any], tmp_path: Path) -> None:
    planted = plant("on_step_end", 4, weight(math.nan))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted], **more)
    assert "holds NaN" in str(check(one, tmp_path / "run", ends=True))


def test_a_model_spoiled_at_the_very_end_is_not_returned_as_trained_and_not_written(tmp_path: Path) -> None:
    planted = plant("on_train_end", 6, weight(math.nan))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted])
    assert "The model cannot be kept as it is" in str(check(one, tmp_path / "run", ends=True))
    with pytest.raises(NumericsError, match="holds NaN"):
        one.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final" / "model.safetensors").exists()


@pytest.mark.parametrize("name", rest_nightly(["exp_avg", "exp_avg_sq"], 1))
def test_a_moment_that_becomes_nan_sends_the_run_back(name: str, tmp_path: Path) -> None:
    planted = plant("on_step_end", 3, moment(math.nan, name))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted])
    check(one, tmp_path / "run", ends=False)


@pytest.mark.parametrize(
    "tree, said",
    [
        ({"optimizer": {"state": {0: {"exp_avg_sq": torch.tensor([-1e-9])}}}}, "exp_avg_sq of w holds values below 0"),
        ({"optimizer": {"state": {0: {"exp_avg": torch.tensor([1e38])}}}}, "exp_avg of w holds 1e[+]38"),
        ({"optimizer": {"state": {}, "param_groups": [{"lr": math.nan}]}}, "the optimizer's learning rate is nan"),
        ({"state": {"controllers": {"kl": math.inf}}}, "the coefficient kl holds inf"),
        ({"reference": {"head": torch.tensor([math.nan])}}, "the reference's head holds NaN"),
        ({"critic": {"linear": torch.tensor([-math.inf])}}, "the critic's linear holds infinity"),
        ({"scaler": {"scale": math.nan}}, "the scaler's scale holds nan"),
    ],
)
def test_whatever_a_checkpoint_would_hold_is_looked_at(tree: dict[str, Any], said: str) -> None:
    assert re.search(said, str(state_fault(tree, ["w"])))


def test_a_healthy_state_is_left_alone() -> None:
    moments = {"exp_avg": torch.tensor([-1.0]), "exp_avg_sq": torch.tensor([0.0]), "step": torch.tensor(3.0)}
    groups = [{"lr": 0.0, "betas": (0.9, 0.999), "eps": (1e-30, 1e-3)}, {"lr": None}, {"lr": torch.tensor(1e-3)}]
    assert state_fault({"optimizer": {"state": {0: moments}, "param_groups": groups}}, ["w"]) is None


@pytest.mark.slow
def test_going_back_at_the_last_step_makes_the_last_step_again(tmp_path: Path) -> None:
    planted = plant("on_step_end", 6, weight(math.nan))
    planted.one = one = trainer(tmp_path / "run", callbacks=[planted])
    check(one, tmp_path / "run", ends=False)
    assert [row["step"] for row in lines(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bad_value_among_many_is_found_and_large_sums_are_none(dtype: torch.dtype) -> None:
    many = [torch.full((300, 300), 60000.0, dtype=dtype), torch.full((7,), -60000.0, dtype=dtype)]
    assert are_sound(many)
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = [*many, torch.tensor([1.0, bad], dtype=dtype)]
        assert not are_sound(spoiled)
    cancels = torch.tensor([math.inf, -math.inf], dtype=dtype)
    assert not are_sound([cancels])
    assert are_sound([])
    assert are_sound([torch.empty(0, dtype=dtype), torch.tensor([3], dtype=torch.int8)])
    assert fault_of(torch.tensor([1.0, math.nan], dtype=dtype)) == "NaN"
