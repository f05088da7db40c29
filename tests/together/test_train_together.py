"""`covey.train_together`: several adapters on one base in one process, each as its run alone would have made it."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback

import covey
from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, RewardError
from covey.models import SharedBase
from covey.rollout.decoder import DecoderForward
from kit import tiny_model, tiny_tokenizer

ROWS = Dataset.from_dict({"prompt": [f"What is {i} + {i}?" for i in range(6)]})


def lora(**more):
    return LoraConfig(**{"r": 2, "lora_dropout": 0.2, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **more})


def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def vowels(completions, **kwargs):
    return [sum(c in "aeiou" for c in text) / 8 for text in completions]


def broken(completions, **kwargs):
    raise OSError("the judge is gone")


@pytest.fixture
def base(tmp_path):
    tiny_model(layers=1).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config(place, **more):
    given = {
        "max_steps": 3, "save_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 5, "use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_steps": 1,
    }  # fmt: skip
    return GRPOConfig(str(place), **{**given, **more})


def state_of(run, step=3):
    """Everything of a checkpoint that training depends on: the adapter, and the optimizer with all generators."""
    folder = Path(run) / f"checkpoint-{step}"
    return load_file(folder / "adapter_model.safetensors"), (folder / "covey_state.safetensors").read_bytes()


def are_equal(one, other):
    weights, rest = state_of(one)
    more_weights, more_rest = state_of(other)
    same = weights.keys() == more_weights.keys() and all(torch.equal(weights[k], more_weights[k]) for k in weights)
    return same and rest == more_rest


DIFFERENCES = {
    "seed": {"args": {"seed": 1}},
    "reward": {"reward_funcs": vowels, "args": {"learning_rate": 3e-3}},
    "rank": {"peft_config": {"r": 3, "target_modules": ["q_proj"]}},
    "checkpointing": {"args": {"gradient_checkpointing": True, "max_steps": 4}},
    "kl": {"args": {"beta": 0.1, "num_iterations": 2, "max_steps": 4}},
}


def run_of(name, place):
    found = {"reward_funcs": digits, **DIFFERENCES[name]}
    args = config(place / name, **found.get("args", {}))
    return {**found, "args": args, "peft_config": lora(**found.get("peft_config", {}))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["seed", "reward"], pytest.param(["rank", "checkpointing", "kl"], marks=pytest.mark.nightly)]
)
def test_each_adapter_is_bit_equal_to_its_run_alone_whatever_else_differs(names, base, tmp_path):
    runs = [run_of(name, tmp_path / "together") for name in names]
    trainers = covey.train_together(base, iter(runs), train_dataset=ROWS)
    for name, trainer in zip(names, trainers, strict=True):
        alone = GRPOTrainer(str(base), train_dataset=ROWS, **run_of(name, tmp_path / "alone"))
        alone.train()
        assert are_equal(tmp_path / "together" / name, tmp_path / "alone" / name), name
        losses = [[entry.get("loss") for entry in one.state.log_history] for one in (trainer, alone)]
        assert losses[0] == losses[1]
    assert not are_equal(*(tmp_path / "together" / name for name in names[:2]))


@pytest.mark.slow
def test_the_base_is_in_memory_once_and_stays_as_it_is(base, tmp_path):
    runs = [{"args": config(tmp_path / f"{seed}", seed=seed, max_steps=1)} for seed in range(3)]
    trainers = covey.train_together(base, runs, reward_funcs=digits, train_dataset=ROWS, peft_config=lora())
    weights = [{name: value for name, value in one.model.named_parameters() if "lora_" not in name} for one in trainers]
    assert weights[0]
    for name, value in weights[0].items():
        assert all(other[name].data_ptr() == value.data_ptr() for other in weights[1:]), name
    loaded = tiny_model(layers=1).state_dict()
    inner = trainers[0].model.get_base_model().state_dict()
    assert torch.equal(inner["model.embed_tokens.weight"], loaded["model.embed_tokens.weight"])


@pytest.mark.slow
def test_the_runs_take_turns_and_see_their_own_random_numbers(base, tmp_path):
    order = []

    class Told(TrainerCallback):
        def __init__(self, name):
            self.name = name

        def on_step_end(self, args, state, control, **kwargs):
            order.append(f"{self.name}{state.global_step}")

    before = torch.get_rng_state()
    runs = [{"args": config(tmp_path / name, max_steps=2), "callbacks": [Told(name)]} for name in "ab"]
    covey.train_together(base, runs, reward_funcs=digits, train_dataset=ROWS, peft_config=lora())
    assert order == ["a1", "b1", "a2", "b2"]
    assert torch.equal(before, torch.get_rng_state())
    assert state_of(tmp_path / "a", 2)[1] == state_of(tmp_path / "b", 2)[1]  # the same seed: the same run


@pytest.mark.nightly
def test_the_time_of_a_step_leaves_out_that_of_other_runs(base, tmp_path):
    def slow(completions, **kwargs):
        time.sleep(1.5)
        return digits(completions)

    runs = [
        {"args": config(tmp_path / name, max_steps=1), "reward_funcs": reward}
        for name, reward in (("slow", slow), ("quick", digits))
    ]
    slow_run, quick = covey.train_together(base, runs, train_dataset=ROWS, peft_config=lora())
    seconds = [next(entry["step_time"] for entry in one.state.log_history) for one in (slow_run, quick)]
    assert seconds[1] < 1.5 < seconds[0]


@pytest.mark.slow
def test_one_that_fails_leaves_the_others_to_end(base, tmp_path):
    runs = [
        {"args": config(tmp_path / "bad"), "reward_funcs": broken},
        {"args": config(tmp_path / "good"), "reward_funcs": digits},
    ]
    with pytest.raises(RewardError, match="the judge is gone"):
        covey.train_together(base, runs, train_dataset=ROWS, peft_config=lora())
    assert (tmp_path / "good" / "checkpoint-3").is_dir()


@pytest.mark.slow
def test_a_signal_stops_all_with_a_checkpoint_and_each_goes_on_alone_or_together(base, tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    def runs(place, *callbacks):
        return [
            {"args": config(tmp_path / place / f"{seed}", seed=seed, save_steps=3), "callbacks": list(callbacks)}
            for seed in range(2)
        ]

    common = {"reward_funcs": digits, "train_dataset": ROWS, "peft_config": lora()}
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        covey.train_together(base, runs("cut", Stops()), **common)
    assert stopped.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is handler
    reached = [sorted(path.name for path in (tmp_path / "cut" / name).glob("checkpoint-*")) for name in "01"]
    assert reached == [["checkpoint-2"], ["checkpoint-1"]]
    covey.train_together(base, runs("whole"), **common)
    alone = GRPOTrainer(str(base), args=config(tmp_path / "cut" / "0", seed=0, save_steps=3), **common)
    alone.train(resume_from_checkpoint=True)
    covey.train_together(base, runs("cut")[1:], resume_from_checkpoint="auto", **common)
    for name in "01":
        assert are_equal(tmp_path / "cut" / name, tmp_path / "whole" / name), name


@pytest.mark.slow
def test_a_signal_amid_a_rollout_stops_all_at_their_last_step(base, tmp_path, monkeypatch):
    decode, armed = DecoderForward.decode, []

    class Arms(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            armed.append(1)

    def signalled(*given):
        if armed.count(1) == 2:  # both runs have made a step: the second rollout of the first
            armed.append(0)
            os.kill(os.getpid(), signal.SIGTERM)
        return decode(*given)

    monkeypatch.setattr(DecoderForward, "decode", signalled)
    runs = [{"args": config(tmp_path / f"{seed}", seed=seed, save_steps=9)} for seed in range(2)]
    common = {"reward_funcs": digits, "train_dataset": ROWS, "peft_config": lora(), "callbacks": [Arms()]}
    with pytest.raises(SystemExit):
        covey.train_together(base, runs, **common)
    assert armed == [1, 1, 0]
    for name in "01":
        assert [path.name for path in (tmp_path / name).glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_config": None}, "only adapters share a base"),
        ({"peft_config": lora(bias="all")}, "writes to weights of the base"),
        ({"peft_config": lora(init_lora_weights="pissa")}, "writes to weights of the base"),
        ({"args": None}, "has no args"),
        ({"args": "same"}, "Two runs have the output_dir"),
        ({"args": {"full_determinism": True}}, "full_determinism holds for the whole process"),
    ],
)
def test_what_cannot_share_is_refused_before_any_work(changes, said, base, tmp_path):
    first = {"args": config(tmp_path / "a"), "peft_config": lora()}
    args = changes.get("args", {})
    place = tmp_path / ("a" if args == "same" else "b")
    made = None if args is None else config(place, **(args if isinstance(args, dict) else {}))
    second = {**first, **changes, "args": made}
    with pytest.raises(ConfigError, match=said):
        covey.train_together(base, [first, second], reward_funcs=digits, train_dataset=ROWS)
    assert not (tmp_path / "a").exists()


def test_a_tracker_of_one_run_a_process_is_refused(base, tmp_path):
    args = config(tmp_path / "a")
    args.report_to = ["wandb"]
    with pytest.raises(ConfigError, match="tensorboard or none"):
        covey.train_together(base, [{"args": args}], reward_funcs=digits, train_dataset=ROWS, peft_config=lora())


def test_a_base_is_loaded_alike_or_not_shared(base):
    shared = SharedBase(base)
    one, other = shared.take({"dtype": "float32"}), shared.take({"dtype": "float32"})
    assert one is not other
    assert one.config is not other.config
    assert [weight.data_ptr() for weight in one.parameters()] == [weight.data_ptr() for weight in other.parameters()]
    with pytest.raises(ConfigError, match="dtype differs"):
        shared.take({"dtype": "bfloat16"})
