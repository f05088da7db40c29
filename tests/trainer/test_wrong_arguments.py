"""A wrong argument of the trainer is refused in one sentence with the right one, whatever the type of what was passed."""

import pandas
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import Qwen2Model, TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from covey.cli.flags import Flag, read_yaml
from covey.errors import ArgumentTypeError, ConfigError, DataTypeError, ModelError
from kit import tiny_model, tiny_reward_model, tiny_tokenizer

ROWS = [{"prompt": f"{n} apples"} for n in range(4)]


def trainer(tmp_path, **changed):
    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=1,
        max_completion_length=2,
        report_to="none",
    )
    arguments = {
        "model": tiny_model("qwen2"),
        "reward_funcs": lambda completions, **columns: [float(len(text)) for text in completions],
        "args": args,
        "train_dataset": Dataset.from_list(ROWS),
        "processing_class": tiny_tokenizer(),
    }
    return GRPOTrainer(**arguments | changed)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tokenizer", "Use processing_class"),
        ("reward_func", r"Did you mean reward_funcs\?"),
        ("ref_model", "The reference is a copy of the model: set beta above 0"),
        ("learning_rate", r"It is an option: GRPOConfig\(learning_rate=\.\.\.\)"),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_the_one_that_does(tmp_path, name, hint):
    with pytest.raises(ArgumentTypeError, match=f"{name} is no argument of GRPOTrainer. {hint}"):
        trainer(tmp_path, **{name: None})


def test_every_argument_and_option_that_does_not_exist_is_named_with_its_nearest(tmp_path):
    with pytest.raises(ArgumentTypeError, match=r"reward_func .* reward_funcs\? modle .* model\? arg .* args\?"):
        trainer(tmp_path, reward_func=None, modle=None, arg=None)
    with pytest.raises(ArgumentTypeError, match=r"bta .* beta\? epsilon_hihg .* epsilon_high\?"):
        GRPOConfig(str(tmp_path), bta=0.1, epsilon_hihg=0.3)
    (tmp_path / "run.yaml").write_text("bta: 1\nbeta: 0.1\nepsilon_hihg: 1\n")
    with pytest.raises(ConfigError, match=r"bta .* beta\? epsilon_hihg .* epsilon_high\?"):
        read_yaml(tmp_path / "run.yaml", [Flag(name="beta", help=""), Flag(name="epsilon_high", help="")])


def test_a_subclass_may_take_arguments_of_its_own(tmp_path):
    class Mine(GRPOTrainer):
        def __init__(self, *args, tokenizer, **kwargs):
            super().__init__(*args, **kwargs)
            self.given = tokenizer

    made = Mine(tiny_model("qwen2"), lambda completions: [], GRPOConfig(str(tmp_path)), Dataset.from_list(ROWS),
                processing_class=tiny_tokenizer(), tokenizer=3)  # fmt: skip
    assert made.given == 3


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Linear(2, 2),
        torch.nn.DataParallel(tiny_model("qwen2")),
        tiny_reward_model(),
        Qwen2Model(tiny_model("qwen2").config),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_module_that_is_no_language_model_is_refused_by_its_class(tmp_path, model):
    with pytest.raises(ModelError, match=f"is a {type(model).__name__}, which has no output layer over a vocabulary"):
        trainer(tmp_path, model=model)


@pytest.mark.parametrize(
    ("dataset", "remedy"),
    [
        (ROWS, r"Dataset.from_list\(rows\)"),
        ({"prompt": ["a"]}, r"Dataset.from_dict\(columns\)"),
        (pandas.DataFrame(ROWS), r"Dataset.from_pandas\(frame\)"),
        ((row for row in ROWS), r"Dataset.from_list\(list\(rows\)\)"),
        ("train.jsonl", r"covey.data.load\('train.jsonl'\)"),
        (DatasetDict(), "an empty DatasetDict, without a split; pass a datasets.Dataset"),
    ],
    ids=["list", "columns", "frame", "generator", "file", "no splits"],
)
def test_rows_that_are_no_data_set_are_refused_with_what_makes_them_one(tmp_path, dataset, remedy):
    with pytest.raises(DataTypeError, match=remedy):
        trainer(tmp_path, train_dataset=dataset)


def test_an_optimizer_without_its_schedule_is_refused(tmp_path):
    optimizer = torch.optim.SGD(tiny_model("qwen2").parameters())
    with pytest.raises(ArgumentTypeError, match=r"optimizers is a SGD; give \(optimizer, scheduler\)"):
        trainer(tmp_path, optimizers=optimizer)


def test_an_option_that_a_callback_changes_in_the_middle_of_a_run_is_named_once(tmp_path, caplog):
    class Cools(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            args.temperature /= 2

    made = trainer(tmp_path, callbacks=[Cools()])
    made.args.max_steps = 2
    made.train()
    assert [text for text in caplog.messages if "a callback changed" in text] == [
        "a callback changed temperature in the middle of the run, which acts in part or not at all: options are read where a "
        "run begins. Set them before train()."
    ]


def test_a_second_train_within_the_first_is_refused(tmp_path):
    class Again(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            made.train()

    made = trainer(tmp_path, callbacks=[Again()])
    with pytest.raises(ConfigError, match="train.. is running on this trainer already"):
        made.train()
