"""GRPOTrainer with a processor: rows with and without images, several a prompt, adapters, and an exact resume."""

import json

import datasets
import pytest
import torch
from models import picture, tiny_vlm

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.cli import main
from covey.errors import ConfigError


def reward(completions, **columns):
    return [float(len(set(str(one)))) for one in completions]


def rows():
    ask = lambda text: [{"role": "user", "content": text}]
    return [
        {"prompt": ask("How many?"), "images": [picture(2)]},
        {"prompt": ask("What is 2 + 3?"), "images": []},
        {"prompt": ask("More in the first?"), "images": [picture(3, (64, 32), 1), picture(1)]},
        {"prompt": ask("And here?"), "images": [picture(4, seed=2)]},
    ]


def dataset():
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    return datasets.Dataset.from_list(rows(), features=features)


def trained(path, kind="idefics3", steps=4, resume=None, peft=None, data=None, **options):
    model, processor = tiny_vlm(kind)
    args = GRPOConfig(
        output_dir=str(path), max_steps=steps, per_device_train_batch_size=4, num_generations=2, max_completion_length=6,
        learning_rate=1e-3, lr_scheduler_type="constant", report_to="none", save_strategy="steps", save_steps=3, logging_steps=1, disable_tqdm=True,
        bf16=False, use_cpu=True, seed=3, **options,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward, args, dataset() if data is None else data, processing_class=processor, peft_config=peft
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [pytest.param("idefics3", marks=pytest.mark.nightly), "qwen2_5_vl"])
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path, kind):
    whole = trained(tmp_path / "whole", kind, steps_per_generation=2)
    trained(tmp_path / "cut", kind, steps=3, steps_per_generation=2)  # in the middle of a rollout
    resumed = trained(tmp_path / "cut", kind, steps_per_generation=2, resume=True)
    for (name, mine), theirs in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert (tmp_path / "cut" / "checkpoint-3" / "processor_config.json").exists()


def test_a_critic_that_does_not_see_is_refused_before_anything_is_sampled(tmp_path, monkeypatch):
    scored = []
    monkeypatch.setitem(globals(), "reward", lambda completions, **columns: scored.extend(completions) or [0.0])
    with pytest.raises(ConfigError, match="the language model alone, which does not see"):
        trained(tmp_path, "llava", steps=1, algorithm=alg.ppo(critic_model="separate"))
    assert not scored


def test_an_adapter_on_the_language_model_leaves_the_vision_tower_alone(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=r".*text_model.*\.(q_proj|v_proj)", task_type="CAUSAL_LM")
    before, _ = tiny_vlm("idefics3")
    trainer = trained(tmp_path, peft=config, steps=2, rollout_log_steps=1, log_multimodal=False)
    assert [path.name for path in (tmp_path / "rollouts").iterdir() if path.is_dir()] == [], "no images are kept"
    assert len(list((tmp_path / "rollouts").glob("*.parquet"))) == 2
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert names
    assert all("text_model" in name for name in names)
    after = trainer.model.get_base_model()
    for (name, mine), theirs in zip(
        after.model.vision_model.named_parameters(), before.model.vision_model.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert any(p.abs().max() > 0 for name, p in trainer.model.named_parameters() if "lora_B" in name)


@pytest.mark.slow
def test_a_run_of_the_command_line_reads_an_image_column(tmp_path, capsys):
    model, processor = tiny_vlm("llava")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    for i in range(4):
        picture(i).save(tmp_path / f"{i}.png")
    lines = [
        {"prompt": [{"role": "user", "content": "How many?"}], "image": f"{i}.png", "answer": str(i)} for i in range(4)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = [
        "train",
        "--model",
        str(tmp_path / "model"),
        "--dataset",
        str(tmp_path / "train.jsonl"),
        "--reward",
        "length",
    ]
    words += ["--output-dir", str(tmp_path / "run"), "--max-steps", "1", "--num-generations", "2", "--bf16", "false"]
    words += ["--per-device-train-batch-size", "4", "--max-completion-length", "4", "--use-cpu"]
    assert main(words) == 0, capsys.readouterr().err
    assert len(list((tmp_path / "run" / "rollouts" / "images").iterdir())) == 2
    assert (tmp_path / "run" / "checkpoint-1" / "processor_config.json").is_file()
