"""A checkpoint that was changed and sealed again: each fault is one sentence, before a step is taken."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from covey import GRPOConfig, GRPOTrainer
from covey.errors import CheckpointError, CoveyError, ModelError
from covey.models import load_model
from covey.runs.checksums import seal
from kit import rest_nightly, tiny_model, tiny_tokenizer

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def trainer(folder, is_adapter, steps):
    args = GRPOConfig(output_dir=str(folder), max_steps=steps, save_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
                      learning_rate=1e-3, use_cpu=True, report_to="none", disable_tqdm=True, save_async=False)  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"What is {i}?"} for i in range(4)])
    model = tiny_model(layers=1)
    return GRPOTrainer(
        model=model, reward_funcs=lambda completions, **columns: [float(len(text)) for text in completions], args=args,
        train_dataset=rows, processing_class=tiny_tokenizer(), peft_config=LORA if is_adapter else None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with an adapter and one without, each of one step."""
    made = {}
    for is_adapter in (True, False):
        made[is_adapter] = tmp_path_factory.mktemp("run") / "run"
        trainer(made[is_adapter], is_adapter, 1).train()
    return made


def changed(name, change):
    """A change of one tensor file of a checkpoint."""

    def apply(checkpoint: Path):
        tensors = load_file(checkpoint / name)
        change(tensors)
        save_file(tensors, checkpoint / name, metadata={"format": "pt"})

    return apply


def without_one(tensors):
    del tensors[sorted(tensors)[0]]


def reshaped(tensors):
    key = sorted(tensors)[0]
    tensors[key] = torch.zeros(*[size + 1 for size in tensors[key].shape])


def with_nan(tensors):
    tensors[sorted(tensors)[0]].view(-1)[0] = float("nan")


def with_infinity(tensors):
    tensors[sorted(tensors)[-1]].view(-1)[-1] = float("inf")


def moments_reshaped(tensors):
    for key in [key for key in tensors if "exp_avg" in key] or [k for k, v in tensors.items() if v.dim() > 1]:
        tensors[key] = torch.zeros(3, 5)


def nested(checkpoint):
    (checkpoint / "trainer_state.json").write_text("[" * 100_000 + "]" * 100_000)


def no_object(checkpoint):
    (checkpoint / "trainer_state.json").write_text("[1]")


def of_other_fields(checkpoint):
    (checkpoint / "trainer_state.json").write_text(json.dumps({"best_metric": 1, "nonsense": 2}))


ADAPTER, MODEL, STATE = "adapter_model.safetensors", "model.safetensors", "covey_state.safetensors"
CASES = {
    "missing": {True: changed(ADAPTER, without_one), False: changed(MODEL, without_one)},
    "shape": {True: changed(ADAPTER, reshaped), False: changed(MODEL, reshaped)},
    "nan": {True: changed(ADAPTER, with_nan), False: changed(MODEL, with_nan)},
    "infinity": {True: changed(ADAPTER, with_infinity), False: changed(MODEL, with_infinity)},
    "moments": {True: changed(STATE, moments_reshaped), False: changed(STATE, moments_reshaped)},
    "nested": {True: nested, False: nested},
    "list": {True: no_object, False: no_object},
    "fields": {True: of_other_fields, False: of_other_fields},
}


PAIRS = [*product(CASES, (True, False))]


@pytest.mark.parametrize("case, is_adapter", rest_nightly(PAIRS, PAIRS[::3]))
def test_resuming_from_a_changed_checkpoint_is_one_sentence(runs, tmp_path, case, is_adapter):
    run = tmp_path / "run"
    shutil.copytree(runs[is_adapter], run)
    CASES[case][is_adapter](run / "checkpoint-1")
    seal(run / "checkpoint-1", 1)
    with pytest.raises(CheckpointError) as refused:
        trainer(run, is_adapter, 2).train(resume_from_checkpoint=True)
    assert "checkpoint-1" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("is_adapter", [True, False], ids=["adapter", "model"])
@pytest.mark.parametrize("case", ["missing", "shape", "nan", "infinity"])
def test_loading_a_changed_checkpoint_as_a_model_is_one_sentence(runs, tmp_path, case, is_adapter):
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(runs[is_adapter] / "checkpoint-1", folder)
    if is_adapter:
        tiny_model(layers=1).save_pretrained(tmp_path / "base")
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(
            json.dumps({**config, "base_model_name_or_path": str(tmp_path / "base")})
        )
    load_model(folder)
    CASES[case][is_adapter](folder)
    with pytest.raises(ModelError) as refused:
        load_model(folder)
    assert isinstance(refused.value, CoveyError)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("is_adapter", [True, False], ids=["adapter", "model"])
def test_an_unchanged_checkpoint_that_is_sealed_again_resumes(runs, tmp_path, is_adapter):
    run = tmp_path / "run"
    shutil.copytree(runs[is_adapter], run)
    seal(run / "checkpoint-1", 1)
    assert trainer(run, is_adapter, 2).train(resume_from_checkpoint=True).global_step == 2
