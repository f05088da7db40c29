"""Weights, tokenizer and adapter of a model are those of one revision of its repository."""

import json
import shutil

import pytest
import torch

from covey import GRPOConfig
from covey.models import load_model, load_tokenizer
from covey.models.modalities import load_processing
from covey.rewards.builtin.reward_model import ModelReward
from covey.training.loading import load_for_training
from kit import tiny_model, tiny_reward_model, tiny_tokenizer


def revision(cache, name, make, seed):
    """A revision in a cache of the hub: the model of a seed, and a tokenizer whose template is the revision's name."""
    repository = cache / "models--org--tiny"
    folder = repository / "snapshots" / (str(seed) * 40)
    make(seed=seed).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = name
    tokenizer.save_pretrained(folder)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / name).write_text(folder.name)


@pytest.fixture
def place(tmp_path):
    """Options of a model of the older revision."""
    for name, seed in (("main", 1), ("old", 2)):
        revision(tmp_path, name, tiny_model, seed)
    return {"revision": "old", "cache_dir": str(tmp_path)}


def is_of(model, seed):
    return torch.equal(model.get_input_embeddings().weight, tiny_model(seed=seed).get_input_embeddings().weight)


def test_the_tokenizer_of_a_run_is_of_the_revision_of_its_weights(tmp_path, place):
    args = GRPOConfig(output_dir=str(tmp_path / "run"), report_to=[], model_init_kwargs=place)
    loaded = load_for_training("org/tiny", args, torch.device("cpu"))
    assert is_of(loaded.model, 2)
    assert loaded.tokenizer.chat_template == "old"
    assert load_processing(loaded.model, "org/tiny", place).chat_template == "old"
    assert load_processing(loaded.model, "org/tiny", place | {"revision": "main"}).chat_template == "main"


def test_an_adapter_is_loaded_on_the_revision_on_which_it_was_trained(tmp_path, place):
    peft = pytest.importorskip("peft")
    args = GRPOConfig(output_dir=str(tmp_path / "run"), report_to=[], model_init_kwargs=place)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trained = load_for_training("org/tiny", args, torch.device("cpu"), peft_config=adapter).model
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["revision"] == "old"
    for options in ({}, {"revision": "main"}):
        again = load_model(str(tmp_path / "adapter"), {"cache_dir": place["cache_dir"], **options})
        assert is_of(again, 2)
    tokenizer = load_tokenizer(None, str(tmp_path / "adapter"), {"cache_dir": place["cache_dir"]})
    assert tokenizer.chat_template == "old", "the adapter's folder has none of its own"


def test_the_tokenizer_of_a_reward_model_is_of_its_revision(tmp_path):
    for name, seed in (("main", 1), ("old", 2)):
        revision(tmp_path, name, tiny_reward_model, seed)
    place = {"revision": "old", "cache_dir": str(tmp_path)}
    assert ModelReward.of("org/tiny", model_init_kwargs=place).tokenizer.chat_template == "old"


def test_the_class_of_a_model_is_that_of_its_revision(tmp_path, place):
    [main] = [folder for folder in tmp_path.glob("*/snapshots/*") if folder.name[0] == "1"]
    shutil.rmtree(main)
    assert is_of(load_model("org/tiny", place), 2), "the newest revision is not read"
