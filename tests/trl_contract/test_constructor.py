"""What the constructor takes and refuses, with the kinds of errors that TRL 1.16 raises."""

import pytest
import torch
from contract import ROWS, length, options, trainer
from datasets import Dataset
from peft import LoraConfig

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from kit import tiny_model, tiny_reward_model, tiny_tokenizer


def test_without_args_the_run_is_named_after_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "small"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    one = GRPOTrainer(model=str(folder), reward_funcs=length, train_dataset=Dataset.from_list(ROWS))
    assert one.args.output_dir == "small-GRPO"
    assert one.processing_class.padding_side == "left"


REFUSED = {
    "train_dataset of rows": (lambda t: GRPOTrainer(tiny_model(), length, options(t), ROWS), TypeError),
    "train_dataset of splits": (
        lambda t: GRPOTrainer(tiny_model(), length, options(t), {"train": Dataset.from_list(ROWS)}),
        TypeError,
    ),
    "no data set and no environment": (lambda t: trainer(t, rows=None), ValueError),
    "processing_class that is none": (lambda t: trainer(t, processing_class=3), TypeError),
    "peft_config that is none": (lambda t: trainer(t, peft_config={"r": 2}), TypeError),
    "args of another class": (lambda t: GRPOTrainer(tiny_model(), length, {"max_steps": 1}, None), TypeError),
    "a callback that is none": (lambda t: trainer(t, callbacks=[3]), TypeError),
    "callbacks that are no list": (lambda t: trainer(t, callbacks=3), ValueError),
    "no reward": (lambda t: trainer(t, rewards=None), ValueError),
    "weights of another number": (lambda t: trainer(t, reward_weights=[1.0, 2.0]), ValueError),
    "one reward model, two tokenizers": (
        lambda t: trainer(t, rewards=tiny_reward_model(), reward_processing_classes=[tiny_tokenizer()] * 2),
        ValueError,
    ),
    "two rewards, one tokenizer in a list": (
        lambda t: trainer(t, rewards=[length, tiny_reward_model()], reward_processing_classes=[tiny_tokenizer()]),
        ValueError,
    ),
    "a group of one": (lambda t: options(t, num_generations=1), ValueError),
    "groups that do not divide the batch": (lambda t: options(t, num_generations=3), ValueError),
    "both batch options": (lambda t: options(t, generation_batch_size=8, steps_per_generation=1), ValueError),
    "a router coefficient without a router": (lambda t: trainer(t, router_aux_loss_coef=0.1).train(), ValueError),
    "a second adapter": (lambda t: _adapter_on_adapter(t), ValueError),
    "an unknown loss": (lambda t: options(t, loss_type="gpro"), ValueError),
    "a stream without max_steps": (
        lambda t: trainer(t, rows=Dataset.from_list(ROWS).to_iterable_dataset(), max_steps=-1),
        ValueError,
    ),
    "a stream and batches that one process reads": (
        lambda t: trainer(
            t,
            rows=Dataset.from_list(ROWS).to_iterable_dataset(),
            accelerator_config={"dispatch_batches": True},
        ),
        ValueError,
    ),
}


def _adapter_on_adapter(tmp_path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules="all-linear")
    return trainer(tmp_path, model=get_peft_model(tiny_model(), config), peft_config=config)


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_trls_kind_of_error(what, tmp_path):
    make, kind = REFUSED[what]
    with pytest.raises(kind) as caught:
        make(tmp_path)
    assert len(str(caught.value)) > 20, "a sentence that says what to do"


def test_a_wrong_number_of_scores_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="returned 1 value for 4 completions"):
        trainer(tmp_path, rewards=lambda completions, **columns: [1.0]).train()


DEFAULTS = {
    "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "beta": 0.0, "num_iterations": 1, "epsilon": 0.2, "loss_type": "dapo", "scale_rewards": "group", "logging_steps": 10,
    "gradient_checkpointing": True, "remove_unused_columns": False, "shuffle_dataset": True, "importance_sampling_level": "token",
    "mask_truncated_completions": False, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
    "multi_objective_aggregation": "sum_then_normalize", "log_completions": False, "entropy_coef": 0.0, "hub_strategy": "every_save",
}  # fmt: skip


def test_the_defaults_are_trls(tmp_path):
    config = GRPOConfig(output_dir=str(tmp_path))
    found = {name: getattr(config, name) for name in DEFAULTS}
    assert {name: getattr(value, "value", value) for name, value in found.items()} == DEFAULTS


def test_batches_follow_from_each_other(tmp_path):
    one = options(tmp_path, gradient_accumulation_steps=2)
    assert (one.steps_per_generation, one.generation_batch_size) == (2, 8)
    two = options(tmp_path, generation_batch_size=16)
    assert two.steps_per_generation == 4
    assert options(tmp_path, scale_rewards=False).scale_rewards == "none"


def test_a_config_goes_to_json_and_comes_back(tmp_path):
    one = options(tmp_path, beta=0.1, hub_token="hf_secret")
    told = one.to_dict()
    assert told["beta"] == 0.1
    assert "hf_secret" not in one.to_json_string()


def test_transformers_parser_reads_the_options():
    from transformers import HfArgumentParser

    (read,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", "x", "--beta", "0.04", "--num_generations", "2", "--reward_weights", "1.0", "0.5", "--use_cpu"]
    )
    assert (read.beta, read.num_generations, read.reward_weights) == (0.04, 2, [1.0, 0.5])


def test_optimizers_of_the_user_are_used(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    one = trainer(tmp_path, model=model, optimizers=(optimizer, schedule))
    one.train()
    assert one.optimizer is optimizer
    assert one.lr_scheduler is schedule


@pytest.mark.parametrize(
    "case", ["another model", "before the adapter", "without the critic", "another schedule", "no optimizer"]
)
def test_an_optimizer_that_would_not_train_the_model_is_refused(case, tmp_path):
    model = tiny_model()
    held = tiny_model() if case == "another model" else model
    optimizer = torch.optim.SGD(held.parameters(), lr=0.5)
    others = torch.optim.SGD(tiny_model().parameters(), lr=0.5) if case == "another schedule" else optimizer
    schedule = torch.optim.lr_scheduler.ConstantLR(others) if case in ("another schedule", "no optimizer") else None
    pair = (None if case == "no optimizer" else optimizer, schedule)
    lora = LoraConfig(r=2, target_modules=["q_proj"]) if case == "before the adapter" else None
    options = {"algorithm": "ppo"} if case == "without the critic" else {}
    said = {"without the critic": "does not hold the weights of the algorithm's critic", "another schedule": "of another optimizer",
            "no optimizer": "of another optimizer"}  # fmt: skip
    with pytest.raises(ConfigError, match=said.get(case, "holds no trained parameter of the model")):
        trainer(tmp_path, model=model, optimizers=pair, peft_config=lora, **options).train()


def test_the_model_may_be_its_name_with_init_kwargs(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    kwargs = {"revision": "main", "dtype": "float32", "attn_implementation": None, "trust_remote_code": False}
    one = trainer(tmp_path, model=str(tmp_path / "model"), processing_class=None, model_init_kwargs=kwargs)
    assert one.model.dtype == torch.float32


def test_a_reward_model_may_be_its_folder(tmp_path):
    model = tiny_reward_model()
    model.save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    one = trainer(tmp_path, rewards=[str(tmp_path / "judge"), length])
    assert isinstance(one.reward_funcs[0], torch.nn.Module)
    assert one.reward_funcs[1] is length
    assert one.reward_processing_classes[0] is not None
    one.train()
    assert "rewards/judge/mean" in one.state.log_history[-1]


def test_an_adapter_is_trained_and_nothing_else(tmp_path):
    from peft import LoraConfig, PeftModel

    one = trainer(tmp_path, peft_config=LoraConfig(r=2, target_modules="all-linear"), beta=0.1)
    before = {name: value.clone() for name, value in one.model.named_parameters()}
    one.train()
    assert isinstance(one.model, PeftModel)
    assert one.ref_model is None, "the base model is the reference"
    changed = {name for name, value in one.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora" in name for name in changed)
    one.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_evaluations_without_a_set_are_refused_as_by_transformers(tmp_path):
    with pytest.raises(ValueError, match="eval_strategy asks for evaluations, but there is no eval_dataset"):
        trainer(tmp_path, eval_strategy="steps", eval_steps=1)


def test_init_kwargs_beside_a_loaded_model_change_nothing_and_are_named(tmp_path, caplog):
    one = trainer(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    assert str(next(one.model.parameters()).dtype) == "torch.float32"
    assert "model_init_kwargs changes nothing here" in caplog.text


def test_an_unknown_setting_of_the_launcher_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="accelerator_config has 'split', which is not known. It knows split_batches"):
        options(tmp_path, accelerator_config={"split": True})
