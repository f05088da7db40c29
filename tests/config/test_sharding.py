"""`fsdp`, `fsdp_config`, `deepspeed` and a launcher's variables: read as one way to split a model, or refused by name."""

import json

import pytest

from covey import GRPOConfig
from covey.errors import ConfigError
from covey.process.sharding import Sharding


def sharding(**given):
    return GRPOConfig(output_dir="unused", use_cpu=True, report_to="none", **given).sharding


def test_nothing_is_split_unless_it_is_asked_for():
    assert sharding() is None


def test_every_spelling_of_full_sharding_means_the_same(tmp_path):
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"fsdp_version": 2, "fsdp_reshard_after_forward": "true"}))
    full = Sharding(reshard_after_forward=True, blocks=None)
    assert sharding(fsdp=True) == full
    assert sharding(fsdp="full_shard auto_wrap") == full
    assert sharding(fsdp=True, fsdp_config=str(file)) == full
    assert sharding(deepspeed={"zero_optimization": {"stage": 3}}) == full


def test_what_a_forward_gathered_may_be_kept_for_the_backward():
    assert not sharding(fsdp="shard_grad_op").reshard_after_forward
    assert not sharding(fsdp=True, fsdp_config={"reshard_after_forward": False}).reshard_after_forward
    assert not sharding(deepspeed={"zero_optimization": {"stage": 2}}).reshard_after_forward


@pytest.mark.parametrize(
    "spelling",
    [
        {"fsdp": "full_shard auto_wrap offload"},
        {"fsdp": True, "fsdp_config": {"cpu_offload": True}},
        {"fsdp": True, "fsdp_config": {"fsdp_offload_params": "true"}},
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}}},
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}},
        {"deepspeed": {"zero_optimization": {"stage": 3, "cpu_offload": True}}},
    ],
    ids=str,
)
def test_every_spelling_of_offloading_means_the_same(spelling):
    assert sharding(**spelling) == Sharding(reshard_after_forward=True, offloads=True)


def test_offloading_that_is_off_changes_nothing():
    off = {"stage": 3, "offload_param": {"device": "none"}, "cpu_offload": False}
    assert sharding(deepspeed={"zero_optimization": off}) == Sharding()
    assert sharding(fsdp=True, fsdp_config={"offload_params": "false"}) == Sharding()


def test_offloading_of_a_launcher_is_read(monkeypatch):
    for name, value in {**LAUNCHED, "FSDP_OFFLOAD_PARAMS": "true"}.items():
        monkeypatch.setenv(name, value)
    assert sharding().offloads


def test_blocks_are_named_by_class_or_left_out():
    assert sharding(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": "A, B"}).blocks == ("A", "B")
    assert sharding(fsdp=True, fsdp_config={"auto_wrap_policy": "NO_WRAP"}).blocks == ()


def test_activation_checkpointing_of_fsdp_is_that_of_the_run():
    config = GRPOConfig(output_dir="unused", use_cpu=True, fsdp=True, fsdp_config={"activation_checkpointing": True})
    assert config.checkpoints_activations


def test_the_options_stay_as_they_were_given():
    config = GRPOConfig(output_dir="unused", use_cpu=True, fsdp="full_shard", fsdp_config={"version": 2})
    assert (config.fsdp, config.fsdp_config) == ("full_shard", {"version": 2})


LAUNCHED = {  # what `accelerate launch` 1.15 sets for a config with fsdp_version: 2
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}


def test_a_launcher_that_shards_is_heard(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert sharding() == Sharding(True, ("Qwen2DecoderLayer",))
    assert not sharding(fsdp=True, fsdp_config={"reshard_after_forward": False}).reshard_after_forward, "the run wins"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FSDP_VERSION", "1", "FSDP1 is not supported; set fsdp_version: 2"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "use TRANSFORMER_BASED_WRAP"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "use an FSDP2 config"),
    ],
)
def test_a_launcher_that_wants_what_cannot_be_honoured_is_refused(name, value, said, monkeypatch):
    for known, usual in {**LAUNCHED, name: value}.items():
        monkeypatch.setenv(known, usual)
    with pytest.raises(ConfigError, match=said):
        sharding()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fsdp_config": {"version": 2}}, "fsdp_config is given without fsdp"),
        ({"fsdp": "hybrid_shard"}, "'hybrid_shard' is none of"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "FSDP1 is not supported"),
        ({"fsdp": True, "fsdp_config": {"reshard_after_foward": True}}, "Did you mean reshard_after_forward"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "xla=True cannot be honoured"),
        ({"fsdp": True, "fsdp_config": "nowhere.json"}, "neither JSON nor the path"),
        (
            {"fsdp": True, "optim": "ademamix_8bit"},
            "optim='ademamix_8bit' cannot be honoured on a model that is split",
        ),
        ({"fsdp": True, "deepspeed": {"zero_optimization": {"stage": 3}}}, "keep one of them"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "ZeRO stage 1"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}}, "offloads to 'nvme'"),
        ({"fsdp": "full_shard offload", "optim": "paged_adamw_8bit"}, "take an optimizer that is not paged"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": "nvme"}}, "it is true or false"),
        ({"fsdp": True, "fsdp_config": {"version": "two"}}, "has version 'two'"),
        ({"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": 3}}, "no list of class names"),
        ({"fsdp": {"version": 2}}, "its options go into fsdp_config"),
        ({"deepspeed": {"zero_optimization": 3}}, "has zero_optimization=3"),
        ({"deepspeed": {"zero_optimization": {"stage": [3]}}}, r"ZeRO stage \[3\]"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}, "fp16": True}}, "has fp16=True"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2}, "train_batch_size": 7}},
            "train_batch_size=7 where the run has 8",
        ),
        ({"deepspeed": {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}}, "set optim"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 7}},
            "gradient_accumulation_steps=7 where the run has 1",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=said):
        sharding(**given)


def test_what_changes_no_result_is_named(caplog):
    sharding(fsdp=True, fsdp_config={"use_orig_params": True})
    assert any("use_orig_params=True changes nothing here" in record.getMessage() for record in caplog.records)


def test_one_process_has_nothing_to_split(caplog):
    sharding(fsdp=True)
    assert any("fsdp changes nothing here: there is one process" in record.getMessage() for record in caplog.records)


def test_a_batch_that_the_processes_do_not_divide_is_refused(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "world_size", 3)
    with pytest.raises(ConfigError, match="generation_batch_size=8 must be a multiple of 6"):
        GRPOConfig(
            output_dir="unused", use_cpu=True, per_device_train_batch_size=2, num_generations=2, generation_batch_size=8
        )


@pytest.mark.parametrize("average", [{"ema_decay": 0.9}, {"soup_steps": 2}])
def test_weights_that_are_split_are_averaged(average):
    assert sharding(fsdp=True, **average) is not None
