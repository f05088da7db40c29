"""Supervised fine-tuning: the loss is the likelihood of completion tokens, rows are packed, a run resumes bit for bit."""

import json

import pytest
import torch
from datasets import Dataset

from covey import SFTTrainer, sft_config
from covey.cli import main
from covey.data.examples import load_examples
from covey.errors import ConfigError, DataError
from kit import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n} #### {2 * n}"} for n in range(8)]
QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "logging_steps": 1}


def trainer_of(folder, rows=ROWS, max_length=None, eval_dataset=None, **options):
    options = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no", **QUIET, **options}
    return SFTTrainer(
        tiny_model("qwen2"),
        sft_config(output_dir=str(folder), **options),
        Dataset.from_list(rows),
        eval_dataset,
        tiny_tokenizer(),
        max_length=max_length,
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def likelihood(model, rows):
    """Mean -log p of completion tokens and the end, one row at a time."""
    tokenizer, found = tiny_tokenizer(), []
    for row in rows:
        start = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([*start, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0, len(start) - 1 : -1], -1)
        found.append(-logp.gather(-1, ids[len(start) :, None]).squeeze(-1))
    return torch.cat(found).mean().item()


def test_the_loss_of_a_step_is_the_likelihood_of_its_completion_tokens(tmp_path):
    model = tiny_model("qwen2")
    trainer = trainer_of(tmp_path, per_device_train_batch_size=8, max_steps=1)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(likelihood(model, ROWS), rel=1e-4)


def test_rows_are_packed_without_padding(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    seen = []
    inner = trainer.model.model.forward
    trainer.model.model.forward = lambda *args, **kwargs: (
        seen.append(
            tuple(
                next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None).shape[:2]
            )
        ),
        inner(*args, **kwargs),
    )[1]
    trainer.train()
    rows, width = seen[-1]
    assert rows == 1
    assert width > 4 * 6


def test_it_learns_and_tells_the_loss_of_held_out_examples_and_no_reward(tmp_path):
    trainer = trainer_of(
        tmp_path, num_train_epochs=8, lr_scheduler_type="constant", eval_dataset=Dataset.from_list(ROWS[:2])
    )
    trainer.train()
    assert losses(trainer)[-1] < 0.5 * losses(trainer)[0]
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(likelihood(trainer.model, ROWS[:2]), rel=1e-3)
    told = {name for entry in trainer.state.log_history for name in entry}
    assert not [name for name in told if "reward" in name]


def test_a_run_that_stopped_goes_on_bit_for_bit(tmp_path):
    whole = trainer_of(tmp_path / "whole", max_steps=4, save_strategy="steps", save_steps=2)
    whole.train()
    again = trainer_of(tmp_path / "again", max_steps=4, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_long_examples_are_refused_or_left_out(tmp_path, caplog):
    rows = [*ROWS, {"prompt": "long", "completion": "Tom " * 60}]
    with pytest.raises(DataError, match=r"row 8 of train_dataset has \d+ tokens, and 40 fit"):
        trainer_of(tmp_path, rows, max_length=40)
    kept = trainer_of(tmp_path, rows, max_length=40, on_long_prompt="drop")
    assert len(kept.train_dataset) == 8
    assert "1 of 9 rows of train_dataset are left out" in caplog.text


def test_tools_of_a_row_and_options_of_its_template_are_in_what_is_learnt():
    tools = [{"name": "add", "parameters": {"a": "int"}}, {"name": "ask", "parameters": {"text": "str"}}]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    told = [{"messages": turns, "tools": json.dumps(tools)}, {"messages": turns, "tools": None}]
    named = [{"prompt": turns[:1], "completion": turns[1:], "tools": tools}]
    for rows in (told, named):
        first = load_examples(Dataset.from_list(rows))[0]
        assert first["chat_template_kwargs"]["tools"] == tools
        assert (first["prompt"][0]["content"], first["completion"][0]["content"]) == ("hi", "yes")
    assert not load_examples(Dataset.from_list(told))[1]["chat_template_kwargs"]
    own = load_examples(Dataset.from_list([{"messages": turns, "chat_template_kwargs": {"enable_thinking": False}}]))
    assert own[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_options_without_effect_and_other_configurations_are_refused(tmp_path):
    from covey import GRPOConfig

    with pytest.raises(ConfigError, match="num_generations has no effect"):
        sft_config(output_dir=str(tmp_path), num_generations=4)
    for name, value in {
        "temperature": 0.5, "top_p": 0.9, "beta": 0.04, "max_completion_length": 8, "use_vllm": True, "reward_weights": [1.0],
        "num_generations_eval": 2, "async_rollouts": True, "loss_type": "grpo", "router_replay": True, "algorithm": "dapo",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{name} has no effect in supervised fine-tuning"):
            sft_config(output_dir=str(tmp_path), **{name: value})
    with pytest.raises(ConfigError, match="min_p, top_k have no effect"):
        sft_config(output_dir=str(tmp_path), top_k=3, min_p=0.1)
    with pytest.raises(ConfigError, match=r"SFTTrainer\(\.\.\., max_length"):
        sft_config(output_dir=str(tmp_path), max_length=64)
    with pytest.raises(ConfigError, match=r"covey.sft_config"):
        SFTTrainer("nowhere", GRPOConfig(output_dir=str(tmp_path)))


def test_the_command_writes_a_model_that_training_goes_on_from(tmp_path, capsys):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"question": r["prompt"], "solution": r["completion"]}) + "\n" for r in ROWS))
    words = [
        "sft",
        "--model",
        "demo",
        "--dataset",
        str(file),
        "--prompt-column",
        "question",
        "--completion-column",
        "solution",
    ]
    words += [
        "--output-dir",
        str(tmp_path / "run"),
        "--max-steps",
        "2",
        "--per-device-train-batch-size",
        "4",
        "--json",
        "--use-cpu",
    ]
    assert main([*words, "--report-to", "none"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["steps"] == 2
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "run" / "run.json").exists()
