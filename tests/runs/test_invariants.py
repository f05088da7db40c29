"""What must not change while a run goes on is looked at whenever it saves; what is saved loads as what was trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from covey.errors import InvariantError
from covey.invariants import expect_adapter_reloads, fingerprints
from covey.runs import checkpoint
from kit import tiny_model, tiny_tokenizer

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


@pytest.mark.parametrize("is_async", [True, False])
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


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["a copy of the model", "a copy of the adapter"])
def test_a_reference_that_changes_by_itself_ends_the_run(tmp_path: Path, peft_config: Any) -> None:
    one = trainer(tmp_path, peft_config, beta=0.1)
    one.add_callback(At(2, lambda: nudge(next(iter(one._running.learner.reference.weights().values())))))
    with pytest.raises(InvariantError, match="reference model's weight .* has changed though its rule did not move it"):
        one.train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1"]


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["a copy of the model", "a copy of the adapter"])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_fingerprint_tells_any_single_value_and_nothing_else(dtype: torch.dtype) -> None:
    x = torch.ones(5, 3).to(dtype)
    other = x.clone()
    assert fingerprints({"x": x, "none": torch.zeros(0)}) == fingerprints({"x": other, "none": torch.zeros(0)})
    other[4, 2] = 0
    assert fingerprints({"x": x}) != fingerprints({"x": other})
