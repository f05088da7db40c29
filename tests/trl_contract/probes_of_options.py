"""Probes of the constructor and of the options."""

from __future__ import annotations

import inspect
import json

import torch
from datasets import Dataset
from world import ROWS, AtLeast, Listener, length, one, own_run, probe

# -- constructor ---------------------------------------------------------------------------------------------------------


@probe
def constructor_takes(w):
    return AtLeast(list(inspect.signature(w.lib.GRPOTrainer.__init__).parameters)[1:])


@own_run
def constructor_by_position(w):
    made = w.lib.GRPOTrainer(w.model(), length, w.options(), Dataset.from_list(ROWS), None, w.tokenizer())
    return made.train().global_step


@probe
def tokenizer_by_itself_pads_left(w):
    return w.idle.processing_class.padding_side


@probe
def pad_token_is_eos_where_it_is_missing(w):
    tokenizer = w.tokenizer()
    tokenizer.pad_token = None
    made = w.trainer(processing_class=tokenizer)
    return made.processing_class.pad_token == made.processing_class.eos_token


@probe
def training_rows_as_a_list(w):
    return w.lib.GRPOTrainer(w.model_folder, length, w.options(), ROWS)


@probe
def training_set_as_splits(w):
    return w.lib.GRPOTrainer(w.model_folder, length, w.options(), {"train": Dataset.from_list(ROWS)})


@probe
def no_training_set(w):
    return w.trainer(rows=None)


@probe
def processing_class_of_another_kind(w):
    return w.trainer(processing_class=3)


@probe
def peft_config_of_another_kind(w):
    return w.trainer(peft_config={"r": 2})


@probe
def weights_of_another_number(w):
    return w.trainer(reward_weights=[1.0, 2.0])


@probe
def reward_tokenizers_of_another_number(w):
    return w.trainer([length, one], reward_processing_classes=[w.tokenizer()])


@probe
def init_kwargs_beside_a_loaded_model_are_left_alone(w):
    return str(w.trainer(model=w.model(), model_init_kwargs={"dtype": "bfloat16"}).model.dtype)


@probe
def init_kwargs_load_the_model(w):
    return str(w.trainer(model_init_kwargs={"dtype": "bfloat16"}).model.dtype)


@probe
def a_model_that_is_not_there(w):
    try:
        return w.trainer(model=w.place("nowhere"))
    except (OSError, ValueError):
        return "refused"


@probe
def callbacks_as_classes(w):
    made = w.trainer(callbacks=[Listener])
    return type(made.pop_callback(Listener)).__name__


@own_run
def callbacks_added_later(w):
    made, listener = w.trainer(), Listener()
    made.add_callback(listener)
    made.train()
    made.remove_callback(listener)
    return [listener.events.count("on_step_end"), listener in made.callback_handler.callbacks]


@own_run
def a_router_coefficient_without_a_router(w):
    return w.trainer(router_aux_loss_coef=0.1).train().global_step


@own_run
def vllm_that_is_not_there(w):
    try:
        return w.trainer(use_vllm=True, vllm_mode="server", vllm_server_timeout=0.1, vllm_server_port=9).train()
    except Exception:  # noqa: BLE001  # of any kind
        return "refused"


@probe
def synchronised_reference_without_a_kl_term(w):
    return w.trainer(sync_ref_model=True)


@own_run
def synchronised_reference_moves(w):
    made = w.trainer(
        sync_ref_model=True, beta=0.1, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0, max_steps=1, learning_rate=0.1
    )
    made.train()
    pairs = zip(made.model.parameters(), made.ref_model.parameters(), strict=True)
    return all(torch.allclose(a, b) for a, b in pairs)


# -- options -------------------------------------------------------------------------------------------------------------


@probe
def defaults(w):
    config, found = w.lib.GRPOConfig(output_dir=w.place("defaults"), use_cpu=True, bf16=False), {}
    for name in sorted(DEFAULTS):
        value = getattr(config, name)
        found[name] = getattr(value, "value", value)
    return found


DEFAULTS = {
    "adam_beta1", "adam_beta2", "beta", "cast_lm_head_to_fp32", "chat_template_kwargs", "delta", "disable_dropout", "entropy_coef",
    "epsilon", "epsilon_high", "eval_strategy", "generation_batch_size", "generation_kwargs", "gradient_accumulation_steps",
    "gradient_checkpointing", "hub_strategy", "importance_sampling_level", "learning_rate", "log_completions", "logging_steps",
    "loss_type", "lr_scheduler_type", "mask_truncated_completions", "max_completion_length", "max_grad_norm", "max_steps", "min_p",
    "multi_objective_aggregation", "num_completions_to_print", "num_generations", "num_generations_eval", "num_iterations",
    "num_train_epochs", "off_policy_mask_threshold", "per_device_train_batch_size", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "remove_unused_columns", "repetition_penalty", "reward_weights", "save_steps", "save_strategy", "scale_rewards", "seed",
    "shuffle_dataset", "steps_per_generation", "sync_ref_model", "temperature", "top_entropy_quantile", "top_k", "top_p", "use_vllm",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_mode",
    "vllm_server_port", "vllm_tensor_parallel_size", "warmup_steps", "weight_decay",
}  # fmt: skip


DEPRECATED = {"use_transformers_paged", "vllm_importance_sampling_cap"}


@probe
def deprecated_options_have_these_names(w):
    return AtLeast(sorted(set(w.lib.GRPOConfig.__dataclass_fields__) & DEPRECATED))


@probe
def options_have_these_names(w):
    return AtLeast(sorted(set(w.lib.GRPOConfig.__dataclass_fields__) - DEPRECATED))


@probe
def batches_follow_from_accumulation(w):
    found = w.options(gradient_accumulation_steps=2)
    return [found.steps_per_generation, found.generation_batch_size]


@probe
def batches_follow_from_the_generation_batch(w):
    return w.options(generation_batch_size=16).steps_per_generation


@probe
def both_batch_options(w):
    return w.options(generation_batch_size=8, steps_per_generation=1)


@probe
def a_generation_batch_that_does_not_divide(w):
    return w.options(generation_batch_size=6)


@probe
def groups_that_do_not_divide(w):
    return w.options(num_generations=3)


@probe
def a_group_of_one(w):
    return w.options(num_generations=1)


@probe
def scale_rewards_as_truth_values(w):
    return [w.options(scale_rewards=value).scale_rewards for value in (True, False, "batch")]


@probe
def an_option_that_does_not_exist(w):
    return w.options(learning_rat=1.0)


@own_run
def an_unknown_loss(w):
    return w.trainer(loss_type="gpro").train()


@probe
def options_as_a_dict(w):
    told = w.options(beta=0.25, hub_token="hf_secret").to_dict()
    return [told["beta"], told["hub_token"], told["loss_type"]]


@probe
def options_from_the_command_line(w):
    from transformers import HfArgumentParser

    words = [
        "--output_dir",
        "x",
        "--beta",
        "0.04",
        "--num_generations",
        "2",
        "--reward_weights",
        "1.0",
        "0.5",
        "--use_cpu",
    ]
    (read,) = HfArgumentParser(w.lib.GRPOConfig).parse_args_into_dataclasses([*words, "--bf16", "False"])
    return [read.beta, read.num_generations, read.reward_weights]


@probe
def options_as_json(w):
    return json.loads(w.options(max_completion_length=7).to_json_string())["max_completion_length"]


@probe
def an_upload_of_completions_that_are_not_logged(w):
    return w.options(log_completions_hub_repo="me/logs")


@probe
def importance_clips_the_wrong_way_round(w):
    return w.options(vllm_importance_sampling_clip_min=3.0, vllm_importance_sampling_clip_max=2.0)


@own_run
def completions_without_a_limit(w):
    made = w.trainer(max_completion_length=None, generation_kwargs={"max_new_tokens": 3}, logging_steps=1)
    made.train()
    return made.state.log_history[0]["completions/max_length"] <= 3


@own_run
def generation_kwargs_replace_options(w):
    made = w.trainer(generation_kwargs={"max_new_tokens": 2}, logging_steps=1)
    made.train()
    return made.state.log_history[0]["completions/max_length"] <= 2


@own_run
def generation_kwargs_that_do_not_exist(w):
    return w.trainer(generation_kwargs={"beams": 2}).train().global_step


@own_run
def beams(w):
    return w.trainer(generation_kwargs={"num_beams": 2}).train().global_step


@own_run
def every_loss_trains(w):
    names = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"]
    return [w.trainer(loss_type=name, max_steps=1).train().global_step for name in names]


@own_run
def cosine_with_warmup_logs_its_rates(w):
    made = w.trainer(lr_scheduler_type="cosine", warmup_steps=2, max_steps=4, logging_steps=1)
    made.train()
    return [round(entry["learning_rate"], 9) for entry in made.state.log_history if "learning_rate" in entry]
