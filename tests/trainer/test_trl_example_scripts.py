"""Scripts in the form of TRL's examples: a parser of dataclasses, helpers that make parts, callbacks, one import changed."""

import copy
import json
from dataclasses import dataclass, field

import pytest
import torch
from datasets import Dataset, load_dataset
from transformers import GenerationConfig, TrainerCallback

import covey
from covey import (
    DatasetMixtureConfig,
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from covey.errors import ConfigError, DataError
from covey.rewards import get_soft_overlong_punishment, think_format_reward
from kit import tiny_model, tiny_tokenizer


@pytest.fixture
def places(tmp_path):
    """Folders of a model and of a data set with two splits, as hub ids would give them."""
    model, data = tmp_path / "model", tmp_path / "data"
    tiny_model("qwen2").save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    data.mkdir()
    for split, count in (("train", 12), ("test", 4)):
        rows = [{"prompt": f"Tom has {i} apples.", "solution": str(i)} for i in range(count)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(model), str(data)


@dataclass
class Arguments(ScriptArguments):
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "Names of rewards."})


def words(tmp_path, model, data, *more):
    return [
        *("--model_name_or_path", model, "--dataset_name", data, "--output_dir", str(tmp_path / "out")),
        *("--per_device_train_batch_size", "8", "--max_steps", "2", "--max_completion_length", "8"),
        *("--report_to", "none", "--save_strategy", "no", "--logging_steps", "1", "--learning_rate", "1e-2", *more),
    ]


def by_arguments(given):
    """A script whose parser makes every part, with rewards by name, as TRL's own `grpo.py` is built."""
    parser = TrlParser((Arguments, GRPOConfig, ModelConfig, DatasetMixtureConfig))
    script, training, model, mixture = parser.parse_args_and_config(given)
    named = {
        "think_format_reward": think_format_reward,
        "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4),
    }
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    rows = get_dataset(mixture) if mixture.datasets else load_dataset(script.dataset_name)
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=[named[name] for name in script.reward_funcs],
        args=training,
        train_dataset=rows[script.dataset_train_split],
        eval_dataset=rows[script.dataset_test_split] if training.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.accelerator.print("Training completed.")
    trainer.save_model(training.output_dir)
    trainer.end()
    return trainer


def by_messages(given):
    """A script that maps its data to chat messages and puts a quantized model on its GPU by a device map."""
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script, training, model = parser.parse_args_and_config(args=given)
    training.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    quantization = get_quantization_config(model)
    if quantization is not None:
        training.model_init_kwargs |= {"device_map": get_kbit_device_map(), "quantization_config": quantization}
    rows = load_dataset(script.dataset_name, split=script.dataset_train_split).train_test_split(test_size=4, seed=42)
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})

    def accuracy(completions, solution, **columns):
        return [float(want in said[0]["content"]) for said, want in zip(completions, solution, strict=True)]

    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        args=training,
        reward_funcs=[think_format_reward, accuracy],
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(training.output_dir)
    return trainer


def test_a_script_with_rewards_by_name_trains_and_evaluates(tmp_path, places):
    rewards = ("--reward_funcs", "think_format_reward", "get_soft_overlong_punishment")
    trainer = by_arguments(words(tmp_path, *places, *rewards, "--eval_strategy", "steps", "--eval_steps", "2"))
    assert trainer.state.global_step == 2
    names = trainer.state.log_history[0]
    assert "rewards/think_format_reward/mean" in names
    assert "rewards/soft_overlong_punishment_reward/mean" in names
    assert any("eval_reward" in entry for entry in trainer.state.log_history)
    assert (tmp_path / "out/model.safetensors").is_file()


def test_a_script_with_messages_and_an_adapter_trains_the_adapter_only(tmp_path, places):
    trainer = by_messages(
        words(tmp_path, *places, "--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear")
    )
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert (tmp_path / "out/adapter_config.json").is_file()


def test_a_yaml_file_sets_what_the_command_line_leaves_out(tmp_path, places, monkeypatch):
    model, data = places
    monkeypatch.delenv("COVEY_TEST_VARIABLE", raising=False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"env: {{COVEY_TEST_VARIABLE: 7}}\nmax_steps: 9\nnum_generations: 4\nreward_funcs: [think_format_reward]\n"
        f"test_split_size: 0.25\ndatasets:\n  - {{path: {data}, split: train, columns: [prompt], fraction: 0.5}}\n"
        f"  - {{path: {data}, split: test, columns: [prompt], fraction: 0.5}}\n"
    )
    trainer = by_arguments([*words(tmp_path, model, data), "--config", str(recipe)])
    assert (trainer.state.global_step, trainer.args.num_generations) == (2, 4)
    assert len(trainer.train_dataset) == 6  # four rows of each part, a quarter of them held out
    import os

    assert os.environ.pop("COVEY_TEST_VARIABLE") == "7"


def test_a_yaml_file_with_an_unknown_option_names_it(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_stepz: 9\n")
    parser = TrlParser((ScriptArguments, GRPOConfig))
    with pytest.raises(ConfigError, match="--max_stepz 9, which no option of this script takes"):
        parser.parse_args_and_config(["--output_dir", str(tmp_path), "--config", str(recipe)])
    with pytest.raises(ConfigError, match=r"nowhere.yaml is no file"):
        parser.parse_args_and_config(["--config", "nowhere.yaml"])


def test_helpers_refuse_what_contradicts_itself(tmp_path):
    with pytest.raises(ConfigError, match="load_in_8bit and load_in_4bit are both set"):
        ModelConfig(load_in_4bit=True, load_in_8bit=True)
    with pytest.raises(DataError, match="has no data sets"):
        get_dataset(DatasetMixtureConfig())
    assert get_peft_config(ModelConfig()) is None
    assert get_quantization_config(ModelConfig()) is None
    four = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True))
    assert (four.bnb_4bit_compute_dtype, four.bnb_4bit_use_double_quant) == (torch.bfloat16, True)


@pytest.mark.parametrize(
    "name, instead",
    [
        ("LogCompletionsCallback", "from trl import LogCompletionsCallback"),
        ("DPOTrainer", "GRPO and its family only"),
        ("RLOOTrainer", r"algorithm=alg.rloo\(\)"),
        ("SFTConfig", "sft_config"),
    ],
)
def test_a_helper_of_trl_that_is_not_here_says_what_to_do(name, instead):
    with pytest.raises(ImportError, match=f"covey has no {name}: .*{instead}"):
        getattr(covey, name)


class Completions(TrainerCallback):
    """Draws a completion of each held-out prompt through the trainer's wrapped model, as LogCompletionsCallback does."""

    def __init__(self, trainer):
        self.trainer, self.rows = trainer, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % state.eval_steps:
            return
        tokenizer, accelerator = kwargs["processing_class"], self.trainer.accelerator
        tokenizer.padding_side = "left"
        with accelerator.split_between_processes(list(self.trainer.eval_dataset["prompt"])) as prompts:
            model = accelerator.unwrap_model(self.trainer.model_wrapped)
            ids = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
            drawn = model.generate(**ids, max_new_tokens=4)
            self.rows += tokenizer.batch_decode(drawn[:, ids.input_ids.shape[1] :])


class Average(TrainerCallback):
    """Keeps a second model and an average of the weights, and saves it at the end, as BEMACallback does."""

    @torch.no_grad()
    def on_train_begin(self, args, state, control, model, **kwargs):
        self.copy = type(model)(model.config)
        self.copy.load_state_dict(model.state_dict())

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, **kwargs):
        for kept, new in zip(self.copy.parameters(), model.parameters(), strict=True):
            kept.mul_(0.5).add_(new, alpha=0.5)

    def on_train_end(self, args, state, control, **kwargs):
        self.copy.save_pretrained(f"{args.output_dir}/average")


class Follow(TrainerCallback):
    """Moves another model towards the policy by the trainer's options, as SyncRefModelCallback does."""

    def __init__(self, other, accelerator):
        self.other, self.accelerator = other, accelerator

    def on_step_end(self, args, state, control, **kwargs):
        model = self.accelerator.unwrap_model(kwargs["model"])
        if state.global_step % args.ref_model_sync_steps == 0:
            for mine, new in zip(self.other.parameters(), model.parameters(), strict=True):
                mine.data.mul_(1 - args.ref_model_mixup_alpha).add_(new.data, alpha=args.ref_model_mixup_alpha)


def small(tmp_path, **changed):
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=8, max_steps=2, max_completion_length=8, report_to="none",
        learning_rate=1e-2, eval_strategy="steps", eval_steps=2, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0, save_strategy="no", **changed,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"Tom has {i} apples."} for i in range(8)])
    return GRPOTrainer(
        tiny_model("qwen2"), lambda completions, **_: [float(len(c)) for c in completions], args,
        train_dataset=rows, eval_dataset=rows.select(range(3)), processing_class=tiny_tokenizer(),
    )  # fmt: skip


def test_callbacks_that_draw_average_and_follow_work_when_handed_in(tmp_path):
    trainer = small(tmp_path)
    draws, average, follow = Completions(trainer), Average(), Follow(copy.deepcopy(trainer.model), trainer.accelerator)
    for callback in (draws, average, follow):
        trainer.add_callback(callback)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    assert len(draws.rows) == 3
    after = list(trainer.model.parameters())
    assert any(not torch.equal(was, now) for was, now in zip(before, after, strict=True))
    assert all(torch.equal(other, now) for other, now in zip(follow.other.parameters(), after, strict=True))
    assert (tmp_path / "out/average/model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore")  # trl asks transformers and huggingface_hub by former names
def test_trls_callbacks_work_when_handed_in(tmp_path):
    trl = pytest.importorskip("trl", reason="pip install trl")
    trainer = small(tmp_path)
    other = copy.deepcopy(trainer.model)
    for callback in (
        trl.LogCompletionsCallback(trainer, GenerationConfig(max_new_tokens=4), freq=1),
        trl.RichProgressCallback(),
        trl.SyncRefModelCallback(other, trainer.accelerator),
        trl.BEMACallback(update_freq=1),
    ):
        trainer.add_callback(callback)
    trainer.train()
    policy = list(trainer.model.parameters())
    assert all(torch.equal(mine, new) for mine, new in zip(other.parameters(), policy, strict=True))
    assert (tmp_path / "out/bema/model.safetensors").is_file()
