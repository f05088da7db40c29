"""What must not change while a run goes on is looked at whenever it saves; what is saved loads as what was trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoHaConfig, LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from covey.errors import InvariantError
from covey.learner import FIRST_UPDATE
from covey.models import disable_dropout
from covey.runs import checkpoint
from covey.training.invariants import draws_while_training, expect_adapter_reloads, fingerprints
from kit import rest_nightly, tiny_model, tiny_tokenizer

LORA = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [hashlib.sha256(text.encode()).digest()[0] / 256 for text in completions]


class At(TrainerCallback):
    """Does something once, at the end of a step."""

    def __init__(self, step: int, deed: Callable[[], None]) -> None:
        self.step, self.deed = step, deed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.deed()


def trainer(folder: Path, peft_config: Any = None, **changed: Any) -> GRPOTrainer:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 5,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_steps": 1,
        "disable_tqdm": True,
    }
    rows = Dataset.from_list([{"prompt": f"Tom has {i} apples."} for i in range(8)])
    args = GRPOConfig(**{**given, **changed})
    return GRPOTrainer(
        tiny_model("qwen2"), reward, args, rows, processing_class=tiny_tokenizer(), peft_config=peft_config
    )


@torch.no_grad()
def nudge(weight: torch.Tensor) -> None:
    weight.view(-1)[3] += 1e-3


@pytest.mark.parametrize("is_async", rest_nightly([True, False], 1))
def test_a_frozen_weight_that_changes_ends_the_run_and_no_checkpoint_is_made_of_it(
    tmp_path: Path, is_async: bool
) -> None:
    one = trainer(tmp_path, LORA, save_async=is_async)
    frozen = dict(one.model.named_parameters())["base_model.model.model.norm.weight"]
    one.add_callback(At(3, lambda: nudge(frozen)))
    with pytest.raises(InvariantError, match=r"frozen weight base_model.model.model.norm.weight has changed") as raised:
        one.train()
    assert raised.value.exit_code == 72
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    "peft_config", rest_nightly([LORA, None], 1), ids=["a copy of the adapter", "a copy of the model"]
)
def test_a_reference_that_changes_by_itself_ends_the_run(tmp_path: Path, peft_config: Any) -> None:
    one = trainer(tmp_path, peft_config, beta=0.1)
    one.add_callback(At(2, lambda: nudge(next(iter(one._running.learner.reference.weights().values())))))
    with pytest.raises(InvariantError, match="reference model's weight .* has changed though its rule did not move it"):
        one.train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "peft_config", rest_nightly([None, LORA], 1), ids=["a copy of the model", "a copy of the adapter"]
)
def test_a_reference_that_its_rule_moves_is_left_in_peace(tmp_path: Path, peft_config: Any) -> None:
    trainer(tmp_path, peft_config, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2).train()
    trainer(tmp_path, peft_config, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, max_steps=7).train(True)
    assert len(checkpoint.checkpoints(tmp_path)) == 7


def test_the_adapter_of_a_checkpoint_answers_as_the_one_that_was_trained(tmp_path: Path) -> None:
    one = trainer(tmp_path, LORA, max_steps=3)
    one.train()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        trained = one.model.eval()(ids).logits
        base = tiny_model("qwen2")(ids).logits
        loaded = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path / "checkpoint-3").eval()(ids).logits
    assert torch.equal(loaded, trained)
    assert not torch.equal(loaded, base)


def test_an_adapter_file_that_is_not_the_trained_one_is_refused(tmp_path: Path) -> None:
    one = trainer(tmp_path, LORA, max_steps=1)
    one.train()
    folder = tmp_path / "checkpoint-1"
    expect_adapter_reloads(one.model, folder)
    held = load_file(folder / "adapter_model.safetensors")
    nudge(next(iter(held.values())))
    save_file(held, folder / "adapter_model.safetensors")
    with pytest.raises(InvariantError, match=r"does not load as the one that is trained \(its tensor"):
        expect_adapter_reloads(one.model, folder)
    one.save_model(str(folder))
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))
    with pytest.raises(InvariantError, match="its option lora_alpha differs"):
        expect_adapter_reloads(one.model, folder)


class Before(TrainerCallback):
    """Does something once in the middle of a step: when its rollout is there and its update is not."""

    def __init__(self, step: int, one: GRPOTrainer, deed: Callable[[], None]) -> None:
        self.step, self.one, self.deed = step, one, deed

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            learner = self.one._running.learner
            annotate = learner.annotate

            def then(*given: Any) -> Any:
                found = annotate(*given)
                self.deed()
                del learner.annotate
                return found

            learner.annotate = then


@torch.no_grad()
def shrink(model: torch.nn.Module) -> None:
    """What a callback that swaps in averaged weights, and forgets to swap back, does."""
    for weight in model.parameters():
        weight.mul_(0.9)


@pytest.mark.parametrize(
    "changed, said",
    rest_nightly(
        [
            ({"num_iterations": 2}, "learner's log-probabilities are .* from its own at the rollout"),
            ({}, "sampler does not sample from the policy that is trained"),
        ],
        1,
    ),
    ids=["its own", "the sampler's"],
)
def test_a_ratio_that_is_not_1_at_the_first_update_of_a_rollout_ends_the_run_before_the_update(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    one = trainer(tmp_path, max_steps=6, **changed)
    one.add_callback(Before(4, one, lambda: shrink(one.model)))
    with pytest.raises(InvariantError, match=said) as raised:
        one.train()
    assert raised.value.exit_code == 72
    assert one.state.global_step == 4
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [1, 2, 3, 4]


class Gaps(TrainerCallback):
    """What the ratio is watched by, at each rollout's first update."""

    def __init__(self, one: GRPOTrainer) -> None:
        self.one, self.seen = one, []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        learner = self.one._running.learner
        watch = learner.before_first_update

        def look(metrics: Any, version: int) -> None:
            self.seen.append([metrics[name].value for name in (FIRST_UPDATE, "sampling/sampling_logp_difference/mean")])
            watch(metrics, version)

        learner.before_first_update = look


@pytest.mark.parametrize(
    "peft_config, changed, looks",
    rest_nightly(
        [
            (LORA, {}, 6),
            (None, {"num_iterations": 2, "beta": 0.1, "max_tokens_per_microbatch": 40}, 3),
            (None, {"steps_per_generation": 3, "gradient_accumulation_steps": 1}, 2),
        ],
        2,
    ),
    ids=["on-policy, LoRA", "num_iterations, small micro-batches and a KL term", "steps_per_generation"],
)
def test_a_healthy_run_has_ratio_1_up_to_float_error_at_the_first_update_of_every_rollout(
    peft_config: Any, changed: dict[str, Any], looks: int, tmp_path: Path
) -> None:
    one = trainer(tmp_path, peft_config, max_steps=6, save_strategy="no", **changed)
    gaps = Gaps(one)
    one.add_callback(gaps)
    one.train()
    assert len(gaps.seen) == looks
    assert all(gap < 1e-5 for pair in gaps.seen for gap in pair), gaps.seen


DROPPING = {
    "LoRA": LoraConfig(r=2, lora_alpha=8, lora_dropout=0.5, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "LoHa": LoHaConfig(r=2, module_dropout=0.5, init_weights=False, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("kind", DROPPING)
def test_a_model_that_drops_out_is_not_expected_to_repeat_itself(kind: str, tmp_path: Path) -> None:
    one = trainer(tmp_path, DROPPING[kind], num_iterations=2, disable_dropout=False, max_steps=2)
    assert draws_while_training(one.model)
    assert one.train().global_step == 2
    assert not draws_while_training(tiny_model("qwen2"))
    disable_dropout(one.model)
    assert not draws_while_training(one.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_fingerprint_tells_any_single_value_and_nothing_else(dtype: torch.dtype) -> None:
    x = torch.ones(5, 3).to(dtype)
    other = x.clone()
    assert fingerprints({"x": x, "none": torch.zeros(0)}) == fingerprints({"x": other, "none": torch.zeros(0)})
    other[4, 2] = 0
    assert fingerprints({"x": x}) != fingerprints({"x": other})


class Thinned(torch.nn.Dropout):
    """As remote code names a layer of its own."""


def test_dropout_is_off_in_layers_of_another_name() -> None:
    layer, ones = torch.nn.Sequential(Thinned(0.5)).train(), torch.ones(64)
    disable_dropout(layer)
    assert torch.equal(layer(ones), ones)
