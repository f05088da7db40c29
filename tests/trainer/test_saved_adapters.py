"""A saved adapter as the model of a run: it is trained further, and a second adapter never takes its place."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey import GRPOConfig, GRPOTrainer
from covey.adapters import has_adapter, with_adapter, with_saved_adapter
from covey.cli import main
from covey.cli.adapter import adapter_to_train
from covey.cli.plan import model_config
from covey.errors import ConfigError, ModelError
from covey.models import load_model, load_tokenizer
from covey.serving.loading import with_merged_adapter
from kit import rest_nightly, tiny_model, tiny_tokenizer

peft = pytest.importorskip("peft")
IDS = torch.arange(3, 15)[None]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying"),
]
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def saved_adapter(place: Path, **config: Any) -> Path:
    """A base and an adapter on it that changes its answers, in `place/base` and `place/adapter`."""
    tiny_model("qwen2").save_pretrained(place / "base")
    tiny_tokenizer().save_pretrained(place / "base")
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(**{**LORA, **config}, init_lora_weights=False))
    adapted.save_pretrained(place / "adapter")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "of the adapter"
    tokenizer.save_pretrained(place / "adapter")
    return place / "adapter"


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits


def base_folder(adapter: Path) -> Path:
    """The base of an adapter in a test's folder, or in its run."""
    return next(place / "base" for place in adapter.parents if (place / "base").is_dir())


def answer_of(folder: Path) -> torch.Tensor:
    """Logits of the adapter by PEFT alone."""
    return logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder(folder)), folder))


def trainer(model: Any, place: Path, peft_config: Any = None, tokenizer: Any = None, **options: Any) -> GRPOTrainer:
    args = {"max_steps": 2, "save_strategy": "no", "learning_rate": 1e-2, "beta": 0.1, **options}
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [len(set(text)) / 10 for text in completions],
        args=GRPOConfig(
            str(place / "run"), per_device_train_batch_size=4, num_generations=4, max_completion_length=6, logging_steps=1,
            report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, **args
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{i} + 1"} for i in range(8)]),
        peft_config=peft_config,
        processing_class=tokenizer,
    )  # fmt: skip


def test_the_adapter_in_a_folder_is_trained_further(tmp_path):
    adapter = saved_adapter(tmp_path)
    run = trainer(str(adapter), tmp_path, save_strategy="steps", save_steps=2)
    assert torch.allclose(logits(run.model), answer_of(adapter), atol=1e-6)
    assert run.processing_class.chat_template == "of the adapter"
    run.train()
    first = next(entry for entry in run.state.log_history if "kl" in entry)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6), "the reference is the adapter, not its base"
    checkpoint = tmp_path / "run" / "checkpoint-2"
    end = logits(run.model)
    assert not torch.allclose(end, answer_of(adapter), atol=1e-4)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, checkpoint)), end)


OVERLAPPING = {"q_proj": 8, "layers.0.self_attn.q_proj": 3}
"""PEFT takes the first that ends a layer's name, and sorts the entries as it saves."""


@pytest.mark.filterwarnings("ignore:.* goes on from step 1")
@pytest.mark.parametrize(
    "option, arrives",
    rest_nightly(
        product(["rank_pattern", "alpha_pattern"], ["as options", "on the model"]),
        [("alpha_pattern", "on the model")],
    ),
)
def test_entries_for_one_layer_mean_the_same_in_the_saved_adapter(tmp_path, option, arrives, caplog):
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **{option: dict(OVERLAPPING)})
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    is_option = arrives == "as options"
    model, adapter = (base, config) if is_option else (peft.get_peft_model(base, config), None)
    run = trainer(model, tmp_path, adapter, tiny_tokenizer(), save_strategy="steps", save_steps=1)
    run.train()
    end = logits(run.model)
    assert not torch.allclose(end, logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base")), atol=1e-4)
    assert torch.equal(answer_of(tmp_path / "run" / "checkpoint-2"), end)
    note = f"{option} holds 'layers.0.self_attn.q_proj', from which no layer with an adapter takes its value"
    assert (note in caplog.text) == is_option
    if is_option:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **{option: dict(OVERLAPPING)})
        resumed = trainer(again, tmp_path, config, tiny_tokenizer())
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
        assert torch.equal(logits(resumed.model), end)


def test_patterns_that_end_no_name_are_named_and_broken_ones_refused(caplog):
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"q_porj": 8, "q_proj": 2})
    with_adapter(tiny_model("qwen2"), adapter)
    assert "rank_pattern holds 'q_porj', from which no layer" in caplog.text
    with pytest.raises(ConfigError, match="peft_config cannot be used with this model: nothing to repeat"):
        with_adapter(tiny_model("qwen2"), peft.LoraConfig(target_modules=["q_proj"], rank_pattern={"*.q_proj": 2}))


def test_a_second_adapter_is_refused_before_anything_is_loaded(tmp_path):
    adapter = saved_adapter(tmp_path)
    config = peft.LoraConfig(r=8, target_modules=["q_proj"])
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter)
    loaded = AutoModelForCausalLM.from_pretrained(adapter)
    for model in (str(adapter), loaded, adapted, adapted.get_base_model()):
        with pytest.raises(ConfigError, match="one already. Leave it out to go on training that adapter, or add it"):
            trainer(model, tmp_path, config, tiny_tokenizer())


def test_an_adapter_that_transformers_loaded_frozen_is_refused_with_the_way_to_train_it(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved_adapter(tmp_path))
    with pytest.raises(ConfigError, match="give the adapter's folder as the model to train it further"):
        trainer(model, tmp_path, tokenizer=tiny_tokenizer())


def test_every_command_that_trains_refuses_a_second_adapter(tmp_path, capsys):
    adapter = saved_adapter(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a", "answer": "1", "completion": "b"}) + "\n" for _ in range(4)))
    data = ["--dataset", str(rows), "--model", str(adapter), "--output-dir", str(tmp_path / "run")]
    for words in (
        ["train", *data, "--reward", "math", "--lora-r", "4"],
        ["train", *data, "--reward", "math", "--lora-r", "4", "--dry-run"],
        ["train", *data, "--reward", "math", "--lora-r", "4", "--adapters", "2", "--vary", "seed=1,2"],
        ["sft", *data, "--lora-r", "4"],
        ["tune", *data, "--reward", "math", "--eval-dataset", str(rows), "--search", "lora_r=4,8"],
        ["doctor", *data, "--reward", "math", "--lora-r", "4", "--sample-prompts", "0"],
        ["doctor", "memory", "--model", str(adapter), "--lora-r", "4", "--predict-only"],
    ):
        assert main(words) != 0, words
        printed = capsys.readouterr()
        assert " ".join((printed.out + printed.err).split()).count("one already. Leave it out") == 1, words


def test_an_adapter_whose_base_cannot_be_told_again_is_refused():
    config = peft.LoraConfig(**LORA, init_lora_weights="pissa_niter_2")
    with pytest.raises(ConfigError, match="would belong to no model that can be loaded; use 'pissa'"):
        with_adapter(tiny_model("qwen2"), config)


def test_an_adapter_on_a_relative_folder_keeps_its_base_in_another_working_directory(tmp_path, monkeypatch):
    saved_adapter(tmp_path)
    monkeypatch.chdir(tmp_path)
    adapted = with_adapter(load_model("base"), peft.LoraConfig(**LORA, init_lora_weights=False)).eval()
    adapted.save_pretrained("new")
    (tmp_path / "elsewhere").mkdir()
    tiny_model("qwen2", seed=7).save_pretrained(tmp_path / "elsewhere" / "base")  # another model of that name
    monkeypatch.chdir(tmp_path / "elsewhere")
    with torch.no_grad():
        torch.testing.assert_close(load_model("../new").eval()(IDS).logits, adapted(IDS).logits)


def test_an_activated_adapter_which_would_change_nothing_is_refused_new_loaded_and_saved(tmp_path):
    options = {**LORA, "alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}
    with pytest.raises(ConfigError, match="acts from its alora_invocation_tokens on"):
        with_adapter(tiny_model("qwen2"), peft.LoraConfig(**options))
    with pytest.raises(ConfigError, match="acts from its alora_invocation_tokens on"):
        with_adapter(peft.get_peft_model(tiny_model("qwen2"), peft.LoraConfig(**options)), None)
    with pytest.raises(ConfigError, match="acts from its alora_invocation_tokens on"):
        load_model(saved_adapter(tmp_path, **options))


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_changes_its_base_loads_as_it_was_saved(tmp_path, start):
    saved_adapter(tmp_path)
    adapted = with_adapter(load_model(tmp_path / "base"), peft.LoraConfig(**LORA, init_lora_weights=start))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.1)
    adapted.save_pretrained(tmp_path / "changed")
    torch.testing.assert_close(logits(load_model(tmp_path / "changed")), logits(adapted), atol=1e-4, rtol=0)


def test_the_former_name_of_the_type_acts(tmp_path):
    saved_adapter(tmp_path)
    for dtype in ("bfloat16", torch.bfloat16):
        assert load_model(tmp_path / "base", {"torch_dtype": dtype}).dtype == torch.bfloat16
    assert load_model(tmp_path / "base", {"torch_dtype": "bfloat16", "dtype": "float16"}).dtype == torch.float16


def test_an_unknown_argument_of_the_shipped_model_is_named():
    with pytest.raises(ModelError, match="does not take bogus of model_init_kwargs"):
        load_model("demo", {"bogus": 1})


def test_an_adapter_on_an_adapter_is_refused(tmp_path):
    adapter = saved_adapter(tmp_path)
    model = load_model(str(adapter))
    with pytest.raises(ModelError, match="first covey merge"):
        with_saved_adapter(model, adapter)
    with pytest.raises(ModelError, match="first covey merge"):
        with_merged_adapter(model.get_base_model(), adapter)
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": str(adapter)}))
    with pytest.raises(ModelError, match="does not name its base"):
        load_model(str(adapter))


def test_an_adapter_without_all_of_its_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    adapter = saved_adapter(tmp_path)
    weights = load_file(adapter / "adapter_model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="missing adapter keys"):
        load_model(str(adapter))


def test_an_adapter_of_a_deeper_model_is_refused(tmp_path):
    with_adapter(tiny_model("qwen2", layers=3), peft.LoraConfig(**LORA)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"another model's: it has 4 weights, such as base_model.model.model.layers.2"):
        with_saved_adapter(tiny_model("qwen2", layers=2), tmp_path)


def test_an_adapter_of_prompts_for_several_tasks_is_not_taken_for_another_models(tmp_path):
    config = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2, num_ranks=2)
    adapted = peft.get_peft_model(tiny_model("qwen2"), config).eval()
    adapted.save_pretrained(tmp_path)
    loaded = with_saved_adapter(tiny_model("qwen2"), tmp_path).eval()
    task = {"input_ids": IDS, "task_ids": torch.tensor([1])}
    assert torch.equal(loaded(**task).logits, adapted(**task).logits)


def test_memory_is_planned_for_the_adapter_in_the_folder(tmp_path):
    adapter = saved_adapter(tmp_path)
    planned = adapter_to_train({"model": str(adapter)})
    assert (planned.r, set(planned.target_modules), planned.inference_mode) == (4, set(LORA["target_modules"]), False)
    assert model_config(str(adapter), False).hidden_size == 32


@pytest.mark.parametrize("tied", rest_nightly([True, False], 1))
def test_an_adapter_over_resized_embeddings_loads_and_merges(tmp_path, tied):
    tiny_model("qwen2", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(len(tokenizer))
    run = trainer(base, tmp_path, peft.LoraConfig(**LORA), tokenizer, save_strategy="steps", save_steps=2)
    run.train()
    ids = torch.tensor([[3, 4, len(tokenizer) - 1, len(tokenizer) - 2, 5]])
    expected, checkpoint = logits(run.model, ids), tmp_path / "run" / "checkpoint-2"
    assert torch.equal(logits(load_model(str(checkpoint)), ids), expected)
    assert len(load_tokenizer(None, checkpoint)) == len(tokenizer)
    assert main(["merge", str(checkpoint), "-o", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged, ids), expected, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == len(tokenizer)


@pytest.mark.parametrize(
    "modules, tied",
    rest_nightly(
        [
            (modules, tied)
            for modules in (["q_proj", "embed_tokens"], ["embed_tokens", "lm_head"])
            for tied in (True, False)
        ],
        [(["q_proj", "embed_tokens"], True)],
    ),
)
def test_an_adapter_on_the_embeddings_trains_and_merges(tmp_path, modules, tied):
    tiny_model("qwen2", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=modules)
    run = trainer(str(tmp_path / "base"), tmp_path, config, save_strategy="steps", save_steps=2)
    run.train()
    logged = [entry for entry in run.state.log_history if "grad_norm" in entry]
    assert all(entry["grad_norm"] > 0 for entry in logged)
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-4 for entry in logged)
    assert main(["merge", str(tmp_path / "run" / "checkpoint-2"), "-o", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged), logits(run.model), atol=1e-5)


@pytest.mark.parametrize("arrives", rest_nightly(["saved", "new"], 1))
def test_a_script_is_told_that_the_default_learning_rate_is_low_for_an_adapter(tmp_path, arrives, caplog):
    adapter = saved_adapter(tmp_path)
    given = (str(adapter), None) if arrives == "saved" else (str(tmp_path / "base"), peft.LoraConfig(**LORA))
    run = trainer(
        given[0], tmp_path, given[1], learning_rate=GRPOConfig(str(tmp_path / "x")).learning_rate, max_steps=1
    )
    run.train()
    said = [one.getMessage() for one in caplog.records if one.getMessage().startswith("advice: learning_rate=1e-06")]
    assert len(said) == 1
    assert "an adapter" in said[0]


@pytest.mark.filterwarnings("error:.is_gradient_checkpointing. is deprecated")  # the suite ignores it otherwise
def test_a_script_sees_no_warning_of_names_that_peft_calls(tmp_path: Path) -> None:
    with_adapter(tiny_model("qwen2"), peft.LoraConfig(**LORA)).save_pretrained(tmp_path)
    assert has_adapter(with_saved_adapter(tiny_model("qwen2"), tmp_path))
