"""No accepted option is a no-op: each is read somewhere, by Covey or by the part of transformers that is named here."""

import ast
from pathlib import Path

from covey.config import GRPOConfig, options
from covey.process.world import World
from covey.rollout import NativeSampler, choose_sampler
from covey.training.build_sampler import sampler_options
from kit import tiny_model, tiny_tokenizer

SRC = Path(options.__file__).parents[1]

BY_TRANSFORMERS = {
    "Trainer.get_optimizer_cls_and_kwargs": {"adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"},
    "TrainingArguments.get_warmup_steps": {"warmup_steps"},
    "TrainingArguments, when it finds the device": {"use_cpu", "ddp_backend", "ddp_timeout", "tf32"},
    "TrainingArguments.get_process_log_level": {"log_level", "log_level_replica"},
    "DefaultFlowCallback": {"logging_strategy", "logging_first_step", "eval_strategy", "eval_delay"},
    "TrainerState.compute_steps": {"logging_steps", "eval_steps", "save_steps"},
    "the callbacks of trackers": {
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
    },
    "TrainingArguments, which keeps both names equal": {"activation_checkpointing", "activation_checkpointing_kwargs"},
}


def read_in_covey():
    """Every attribute, argument and text that Covey's own code names, apart from the options themselves and the command line."""
    named = set()
    for file in SRC.rglob("*.py"):
        if file.parent.name in {"config", "cli"}:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                named.add(node.attr)
            elif isinstance(node, ast.arg):
                named.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value)
    return named


def test_every_honoured_option_is_read_by_someone():
    elsewhere = set().union(*BY_TRANSFORMERS.values())
    settled = {"use_vllm", "vllm_mode"}  # they say rollout_backend="vllm"
    counted = {"steps_per_generation", "generation_batch_size", "max_steps", "num_train_epochs"}  # by config/batches.py
    split = {"fsdp", "fsdp_config", "deepspeed", "parallelism_config"}  # they say `sharding`, by config/sharding.py
    former = {"vllm_importance_sampling_cap"}  # it says vllm_importance_sampling_clip_max
    assert options.HONOURED - read_in_covey() - elsewhere - counted - settled - split - former == set()


def test_what_is_left_to_transformers_is_honoured():
    assert set().union(*BY_TRANSFORMERS.values()) <= options.HONOURED


def test_the_options_of_the_sampler_reach_it():
    args = GRPOConfig(
        output_dir="unused", use_cpu=True, rollout_max_rows=4, rollout_cache_fraction=0.25, cuda_graphs=False, attention="torch"
    )  # fmt: skip
    sampler = choose_sampler(tiny_model(), tiny_tokenizer(), **sampler_options(args, World()))
    assert isinstance(sampler, NativeSampler)
    assert (sampler.max_rows, sampler.cache_fraction) == (4, 0.25)
    assert (sampler.graphs_option, sampler.attention_option) == (False, "torch")
    args = GRPOConfig(output_dir="unused", use_cpu=True, rollout_max_rows=4, rollout_backend="transformers")
    assert choose_sampler(tiny_model(), tiny_tokenizer(), **sampler_options(args, World())).max_rows == 4
