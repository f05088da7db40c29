"""Attributes that scripts set on a trainer, and weights that callbacks change: honoured or refused, never ignored."""

import copy

import pytest
import torch
from contract import ROWS, trainer
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from covey import GRPOTrainer
from covey.errors import ConfigError, DataError, InvariantError
from kit import tiny_model, tiny_tokenizer


class At(TrainerCallback):
    """Acts on the trainer or its model at one event of a run, at the end of step 1 for `on_step_end`."""

    def __init__(self, event, act):
        self.act = act
        setattr(self, event, self.once)

    def once(self, args, state, control, **named):
        if state.global_step <= 1:
            self.act()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


REPLACEMENTS = {
    "optimizer": lambda one: sgd(one.model),
    "lr_scheduler": lambda one: torch.optim.lr_scheduler.ConstantLR(one.optimizer),
    "model": lambda one: tiny_model(layers=2),
    "processing_class": lambda one: copy.deepcopy(one.processing_class),
    "train_dataset": lambda one: Dataset.from_list(ROWS[:2]),
    "args": lambda one: copy.copy(one.args),
    "state": lambda one: copy.copy(one.state),
}


def test_an_optimizer_and_its_schedule_that_are_set_before_train_are_used(tmp_path):
    one = trainer(tmp_path)
    assert one.evaluate(Dataset.from_list(ROWS[:1])), "which makes an optimizer of its own"
    one.optimizer = optimizer = sgd(one.model)
    one.lr_scheduler = schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    one.train()
    assert (one.optimizer, one.lr_scheduler) == (optimizer, schedule)
    assert one.callback_handler.optimizer is optimizer
    one.optimizer = one.lr_scheduler = None
    assert one.optimizers == (None, None), "the next run makes its own"


@pytest.mark.parametrize("name", REPLACEMENTS)
@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
def test_what_a_run_was_built_from_is_not_replaced_in_the_middle_of_it(name, event, tmp_path):
    one = trainer(tmp_path, max_steps=2)
    one.add_callback(At(event, lambda: setattr(one, name, REPLACEMENTS[name](one))))
    with pytest.raises(
        ConfigError, match=f"^{name} is set in the middle of a run, which was built with another; set it"
    ):
        one.train()


def test_the_same_object_may_be_set_in_the_middle_of_a_run(tmp_path):
    one = trainer(tmp_path, max_steps=2)
    one.add_callback(At("on_step_end", lambda: [setattr(one, name, getattr(one, name)) for name in REPLACEMENTS]))
    assert one.train().global_step == 2


@pytest.mark.parametrize("name", ["model", "processing_class"])
def test_another_model_is_written_after_training_but_not_trained_or_evaluated(name, tmp_path):
    one = trainer(tmp_path)
    setattr(one, name, tiny_model(layers=2) if name == "model" else tiny_tokenizer().__class__.from_pretrained)
    for use in (one.train, lambda: one.evaluate(Dataset.from_list(ROWS[:1]))):
        with pytest.raises(
            ConfigError, match=f"^{name} was replaced on a trainer that is made already; pass it to a new"
        ):
            use()
    assert not (tmp_path / "out" / "run.json").exists(), "before any work"


def test_a_merged_adapter_may_take_the_models_place_to_be_saved(tmp_path):
    from peft import LoraConfig

    one = trainer(tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    one.train()
    one.model = one.model.merge_and_unload()
    one.save_model(tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize(    ("name", "value"),
    [
        ("beta", 0.1), ("reward_weights", [2.0]), ("loss_type", "grpo"), ("reward_workers", 2), ("report_to", ["wandb"]),
        ("early_stopping_patience", 3), ("output_dir", "elsewhere"),
    ],
)  # fmt: skip
def test_an_option_that_the_constructor_has_read_is_refused_afterwards(name, value, tmp_path):
    one = trainer(tmp_path)
    one.args.learning_rate = 1e-5
    setattr(one.args, name, value)
    with pytest.raises(ConfigError, match=f"^args.{name} was set on a trainer that is made already, which had read it"):
        one.train()
    assert not (tmp_path / "out" / "run.json").exists(), "before any work"


@pytest.mark.parametrize(("name", "entry"), [("report_to", "wandb"), ("reward_weights", 2.0)])
def test_a_list_of_an_option_that_is_changed_in_place_is_refused_too(name, entry, tmp_path):
    one = trainer(tmp_path, **{name: [1.0] if name == "reward_weights" else []})
    getattr(one.args, name).append(entry)
    with pytest.raises(ConfigError, match=f"^args.{name} was set on a trainer that is made already, which had read it"):
        one.train()


def test_a_data_set_that_is_set_on_a_trainer_is_checked_at_once(tmp_path):
    def wants_an_answer(completions, answer, **columns):
        return [0.0] * len(completions)

    one = trainer(tmp_path, wants_an_answer)
    with pytest.raises(DataError, match="needs a column answer"):
        one.train_dataset = Dataset.from_list([{"prompt": "a"}])
    for name in ("train_dataset", "eval_dataset"):
        with pytest.raises(DataError, match="no column 'prompt'"):
            setattr(one, name, Dataset.from_list([{"question": "a"}]))
        with pytest.raises(DataError, match="is a list, not a datasets.Dataset"):
            setattr(one, name, [{"prompt": "a"}])
    one.train_dataset = rows = Dataset.from_list(ROWS[:2])
    assert list(one.train_dataset) == list(rows)
    assert one.train().global_step


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("reward_funcs", "pass it to GRPOTrainer"),
        ("beta", "set it in GRPOConfig"),
        ("ref_model", "sync_ref_model=True"),
        ("data_collator", "map the data set"),
        ("compute_metrics", "a reward function with weight 0"),
        ("preprocess_logits_for_metrics", "a reward function with weight 0"),
        ("formatting_func", "map the data set"),
        ("generation_config", "generation_kwargs"),
        ("tools", r"pass it to GRPOTrainer\(...\)"),
        ("peft_config", r"pass it to GRPOTrainer\(...\)"),
        ("compute_loss_func", "objective="),
        ("optimizer_cls_and_kwargs", "optimizers="),
        ("model_wrapped", "pass model="),
        ("accelerator", "the launcher"),
        ("callbacks", r"add_callback\(\)"),
    ],
)
def test_an_attribute_that_nothing_would_read_is_refused_with_what_to_use(name, instead, tmp_path):
    one = trainer(tmp_path)
    with pytest.raises(ConfigError, match=f"^{name} is set on a GRPOTrainer that is made already, .*{instead}"):
        setattr(one, name, object())


def test_a_subclass_may_keep_what_it_handed_to_the_constructor(tmp_path):
    class Keeps(GRPOTrainer):
        def __init__(self, *arguments, tools=None, peft_config=None, **named):
            super().__init__(*arguments, tools=tools, peft_config=peft_config, **named)
            self.tools, self.peft_config = tools or [], peft_config

    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    one = trainer(tmp_path, kind=Keeps, peft_config=adapter)
    assert one.peft_config is adapter
    with pytest.raises(ConfigError, match=r"peft_config is set on a Keeps that is made already"):
        one.peft_config = None


HEAD = "model.embed_tokens.weight"


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda model: model.requires_grad_(False), "a callback froze every weight in the middle of the run"),
        (lambda model: model.get_parameter(HEAD).requires_grad_(True), f"made {HEAD} trainable .* does not hold it"),
        (
            lambda model: model.add_module("extra", torch.nn.Linear(2, 2)),
            "added extra.weight to the model .* does not hold it",
        ),
        (lambda model: model.half(), "from torch.float32 to torch.float16 in the middle of the run"),
    ],
)
def test_weights_that_a_callback_makes_untrainable_end_the_run(act, sentence, event, tmp_path):
    model = tiny_model(layers=1)
    model.get_parameter(HEAD).requires_grad_(False)
    one = trainer(tmp_path, model=model, max_steps=3, save_strategy="steps", save_steps=10)
    one.add_callback(At(event, lambda: act(model)))
    with pytest.raises(InvariantError, match=sentence):
        one.train()
    assert one.state.global_step == (0 if event == "on_train_begin" else 1)
    assert not list((tmp_path / "out").glob("checkpoint-*")), "what a resume could not continue is not saved"


def test_some_weights_may_be_frozen_for_a_while_and_all_converted_at_the_end(tmp_path):
    model = tiny_model(layers=1)
    head, seen = model.get_parameter(HEAD), []
    one = trainer(tmp_path, model=model, max_steps=3)

    def thaw():
        seen.append(head.detach().clone())
        head.requires_grad_(True)

    start = head.detach().clone()
    one.add_callback(At("on_train_begin", lambda: head.requires_grad_(False)))
    one.add_callback(At("on_step_end", thaw))
    ends = At("on_train_end", lambda: None)
    ends.on_train_end = lambda *words, **named: model.half()
    one.add_callback(ends)
    one.train()
    assert torch.equal(seen[0], start)
    assert not torch.equal(head.detach().float(), start)
    assert head.dtype == torch.float16
