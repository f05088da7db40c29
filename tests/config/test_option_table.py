"""Every option is in the table, with the defaults that people know."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from covey.config import GRPOConfig, options
from covey.errors import ConfigError

FIELDS = {item.name for item in dataclasses.fields(GRPOConfig)}
DEFAULTS = options.defaults_of(GRPOConfig)
TRL = json.loads((Path(__file__).parent / "trl_1_16_defaults.json").read_text())["fields"]
ONLY_IN_NEWER_TRANSFORMERS = {"activation_checkpointing", "activation_checkpointing_kwargs"}


def test_every_option_is_in_exactly_one_class():
    classes = [set(options.HONOURED), set(options.INERT), set(options.REFUSED)]
    assert {name: sum(name in names for names in classes) for name in FIELDS} == dict.fromkeys(FIELDS, 1)
    assert set().union(*classes) - FIELDS <= ONLY_IN_NEWER_TRANSFORMERS


def test_every_group_that_an_option_names_is_shown():
    assert {one.group for one in options.DECLARED.values() if one.group} <= set(options.GROUP_NAMES)


def test_no_option_is_shown_in_two_groups():
    shown = [name for names in options.GROUPS.values() for name in names]
    assert len(shown) == len(set(shown))


def test_names_and_defaults_are_those_of_trl_1_16():
    assert {name: DEFAULTS.get(name, "missing") for name in TRL} == TRL


def test_the_former_name_of_a_bound_sets_it_and_says_so():
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_cap is now vllm_importance_sampling_clip_max"):
        config = GRPOConfig(output_dir="unused", vllm_importance_sampling_cap=2.0)
    assert (config.vllm_importance_sampling_clip_max, config.vllm_importance_sampling_cap) == (2.0, None)
    with pytest.raises(ConfigError, match="are one option; give the second"):
        GRPOConfig(output_dir="unused", vllm_importance_sampling_cap=2.0, vllm_importance_sampling_clip_max=4.0)


@pytest.mark.parametrize("name", sorted(options.REFUSED))
def test_an_option_that_cannot_be_honoured_is_refused_with_a_reason(name):
    default = DEFAULTS[name]
    other = (not default) if isinstance(default, bool) else "something" if default != "something" else "else"
    with pytest.raises(ConfigError, match=f"{name}=.* cannot be honoured: "):
        GRPOConfig(output_dir="unused", **{name: other})


@pytest.mark.parametrize("name", sorted(options.REFUSED))
def test_a_refused_option_at_its_default_is_fine(name):
    GRPOConfig(output_dir="unused", **{name: DEFAULTS[name]})


def test_an_option_with_nothing_to_act_on_is_named_once(caplog):
    GRPOConfig(output_dir="unused", dataloader_num_workers=4, vllm_gpu_memory_utilization=0.9, do_train=True)
    assert [record.getMessage().split("=")[0] for record in caplog.records] == [
        "vllm_gpu_memory_utilization",
        "dataloader_num_workers",
    ]


CHANGES_NO_RESULT = {
    "use_liger_kernel": True, "liger_kernel_config": {"rope": True}, "torch_compile": True, "torch_compile_backend": "inductor",
    "torch_compile_mode": "default", "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"block_size": 32}, "cache_implementation": "static", "torch_empty_cache_steps": 4,
    "auto_find_batch_size": True, "bf16_full_eval": True, "skip_memory_metrics": False, "use_cache": True,
    "save_on_each_node": True, "debug": "underflow_overflow", "ignore_data_skip": True, "accelerator_config": {"even_batches": False},
    "ddp_bucket_cap_mb": 50, "ddp_find_unused_parameters": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CHANGES_NO_RESULT))
def test_an_option_that_changes_no_result_is_accepted_and_named(name, caplog, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # transformers exports some of them
    value = CHANGES_NO_RESULT[name]
    GRPOConfig(output_dir="unused", use_cpu=True, **{name: value})
    said = [record.getMessage() for record in caplog.records]
    assert [one for one in said if one.startswith(f"{name}=")] == [
        f"{name}={value!r} changes nothing here: {options.INERT[name]}."
    ]


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_the_precision_of_evaluation_wants_no_gpu(name):
    assert vars(GRPOConfig(output_dir="unused", **{name: True}))[name] is True


def test_compiling_switches_no_precision(monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.enable_tf32", lambda on: pytest.fail("TF32 was switched"))
    config = GRPOConfig(output_dir="unused", use_cpu=True, torch_compile=True, torch_compile_mode="default")
    assert (config.torch_compile, config.torch_compile_backend, config.torch_compile_mode) == (True, None, "default")


def test_the_settings_of_a_launcher_are_named_only_where_they_differ(caplog):
    GRPOConfig(**GRPOConfig(output_dir="unused").to_dict())
    assert "accelerator_config" not in caplog.text


def test_batches_that_the_launcher_would_split_are_refused():
    with pytest.raises(ConfigError, match="split_batches=True, which cannot be honoured: per_device_train_batch_size"):
        GRPOConfig(output_dir="unused", accelerator_config={"split_batches": True})


def test_the_parser_of_transformers_shows_the_sentence_of_an_option():
    shown = " ".join(HfArgumentParser(GRPOConfig).format_help().split())
    assert "Completions of each prompt (G), compared with each other." in shown


@pytest.mark.parametrize("name", sorted(options.RENAMED))
def test_a_former_name_is_refused_with_the_new_one(name):
    assert name not in FIELDS
    with pytest.raises(ConfigError, match=f"{name} is not an option of GRPOConfig. ") as caught:
        GRPOConfig(output_dir="unused", **{name: 1})
    assert options.RENAMED[name] in str(caught.value)


def test_the_parser_of_transformers_fills_it_in_without_a_warning(caplog):
    parser = HfArgumentParser(GRPOConfig)
    (config,) = parser.parse_args_into_dataclasses(["--output_dir", "unused", "--reward_weights", "1", "0.5"])
    assert config.reward_weights == [1.0, 0.5]
    assert caplog.records == []
