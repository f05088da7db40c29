"""What Covey does with every option: honours it, has nothing for it to act on, or refuses it. One table, light to import.

Each field of GRPOConfig is in exactly one of `HONOURED` (by group), `INERT` and `REFUSED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": (
        "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout",
    ),
    "data": (
        "shuffle_dataset", "remove_unused_columns", "chat_template_kwargs", "on_long_prompt",
    ),
    "steps and batches": (
        "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
        "num_generations", "generation_batch_size", "steps_per_generation", "num_iterations",
    ),
    "sampling": (
        "curriculum", "dynamic_sampling", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "max_tool_calling_iterations",
        "rollout_backend", "rollout_dtype", "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length",
    ),
    "loss": (
        "algorithm", "loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level",
        "mask_truncated_completions", "top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef",
        "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
        "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
        "vespo_lambda_neg",
    ),
    "reference model": (
        "beta", "use_bias_correction_kl", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
    ),
    "rewards": (
        "reward_weights", "scale_rewards", "multi_objective_aggregation", "reward_timeout_seconds", "on_reward_error",
        "metrics_by", "reward_error_limit", "reward_workers", "reward_normalization", "reward_clip",
    ),
    "sampler and learner": (
        "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
    ),
    "optimizer": (
        "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args",
        "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    ),
    "numbers gone bad": (
        "on_bad_numbers", "on_spike", "spike_threshold", "bad_steps_limit", "roll_backs_limit", "roll_back_learning_rate",
    ),
    "alerts": ("alert_actions", "alert_webhook", "alert_detectors", "audit_metrics"),
    "evaluation": (
        "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size",
        "num_generations_eval", "metric_for_best_model", "greater_is_better", "load_best_model_at_end",
        "early_stopping_patience",
    ),
    "output": (
        "output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_async", "save_error_limit", "resume_from_checkpoint",
        "rollout_log_steps", "rollout_total_limit", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id", "logging_strategy", "logging_steps", "logging_first_step", "log_completions",
        "num_completions_to_print", "log_unique_prompts", "log_level", "log_level_replica", "disable_tqdm",
    ),
    "memory, precision and devices": (
        "bf16", "fp16", "tf32", "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        "activation_checkpointing_kwargs", "activation_offloading", "checkpoint_when_needed", "max_tokens_per_microbatch", "logits_chunk_tokens",
        "shared_attention", "use_cpu", "seed",
        "data_seed", "full_determinism", "ddp_backend", "ddp_timeout",
    ),
}  # fmt: skip
"""Options that change what Covey does, as the command line's help shows them."""

HONOURED = frozenset(name for names in GROUPS.values() for name in names)

ALERT_RULES = (
    "data_drift", "dead_groups", "detector_failed", "diversity_loss", "entropy_collapse", "entropy_explosion", "format_loss",
    "gradient_spike", "kl_runaway", "large_updates", "length_collapse", "length_explosion", "non_finite", "repeated_text", "reward_collapse",
    "reward_conflict", "reward_errors", "reward_hacking", "reward_plateau", "reward_swings", "sampler_mismatch", "slow_convergence", "throughput_drop",
    "tiny_updates", "truncation", "update_spike",
)  # fmt: skip
"""What the detectors of `covey.monitor` can report."""

ALERT_ACTIONS = ("log", "off", "lower_learning_rate", "roll_back", "stop")
"""What can follow an alert."""

INHERITED_HELP: Mapping[str, str] = {
    "output_dir": "Folder of this run: checkpoints, metrics, rollouts; it must be new, empty, or this run's own.",
    "max_steps": "Optimizer steps; -1: as many as `num_train_epochs` takes.",
    "num_train_epochs": "Passes over the prompts, when `max_steps` is not set.",
    "per_device_train_batch_size": "Completions of a micro-batch on each device.",
    "gradient_accumulation_steps": "Micro-batches of an optimizer step.",
    "per_device_eval_batch_size": "Completions drawn at a time on each device in evaluation.",
    "lr_scheduler_type": "How the learning rate moves: linear, cosine, constant, constant_with_warmup, ...",
    "lr_scheduler_kwargs": 'More arguments of the scheduler, such as {"num_cycles": 1}.',
    "warmup_steps": "Steps in which the learning rate rises from 0; below 1 it is a share of the run.",
    "optim": "Optimizer by transformers' name: adamw_torch_fused (the default), adamw_8bit, adafactor, sgd, ...",
    "optim_args": 'More arguments of the optimizer, as "name=value,name=value".',
    "weight_decay": "Weight decay, except of biases and norms.",
    "adam_beta1": "Decay of Adam's first moment.",
    "adam_beta2": "Decay of Adam's second moment.",
    "adam_epsilon": "Adam's epsilon.",
    "max_grad_norm": "Clip the gradient to this norm; 0: never.",
    "eval_strategy": "When to evaluate: no, steps or epoch.",
    "eval_steps": "Optimizer steps between evaluations; unset: `logging_steps`; below 1 it is a share of the run.",
    "eval_delay": "Steps or epochs before the first evaluation.",
    "eval_on_start": "Evaluate before the first step.",
    "metric_for_best_model": "Evaluation metric that picks the best checkpoint; unset: reward.",
    "greater_is_better": "Whether more of that metric is better; unset: yes, unless its name ends in loss.",
    "load_best_model_at_end": "End with the weights of the best checkpoint.",
    "save_strategy": "When to save a checkpoint: no, steps, epoch or best.",
    "save_steps": "Optimizer steps between checkpoints; below 1 it is a share of the run.",
    "save_total_limit": "Most checkpoints to keep; the best one always stays.",
    "save_only_model": "Save weights only, without what a resume needs.",
    "resume_from_checkpoint": "Checkpoint to go on from when `train()` is not told another one.",
    "report_to": "Trackers by name: tensorboard, wandb, trackio, mlflow, ..., or none.",
    "run_name": "Name of the run in trackers.",
    "project": "Name of the project in Trackio.",
    "trackio_space_id": "Hugging Face Space of Trackio's live page.",
    "trackio_bucket_id": "Bucket of that Space.",
    "trackio_static_space_id": "Static Space of Trackio.",
    "logging_strategy": "When to log: no, steps or epoch.",
    "logging_first_step": "Log the first step too.",
    "log_level": "How much the main process says: debug, info, warning, error, critical or passive.",
    "log_level_replica": "The same for the other processes.",
    "disable_tqdm": "Show no live progress line.",
    "fp16": "Compute in float16 with loss scaling, on accelerators without bfloat16.",
    "tf32": "Let matrix products on Ampere and newer use TF32.",
    "activation_checkpointing": "The new name of `gradient_checkpointing` in transformers; it wins when set.",
    "activation_checkpointing_kwargs": "Arguments of activation checkpointing.",
    "gradient_checkpointing_kwargs": "The former name of `activation_checkpointing_kwargs`.",
    "use_cpu": "Use the CPU even where there is an accelerator.",
    "seed": "Seed of everything random.",
    "data_seed": "Seed of the order of prompts; unset: `seed`.",
    "full_determinism": "Force deterministic kernels; slower.",
    "ddp_backend": "Communication backend between processes: nccl, gloo, ...",
    "ddp_timeout": "Seconds that processes wait for each other.",
}
"""One sentence for each honoured option that GRPOConfig takes over from TrainingArguments unchanged."""

_NO_LOADER = "prompts are read in the training process, which is never the slow part"
_NO_DDP = "gradients are summed once an optimizer step, without a DistributedDataParallel wrapper"
_NO_METRICS = "evaluation draws completions and scores them with the rewards; there is no compute_metrics"
_NO_UPLOAD = "nothing is uploaded"
_NO_VLLM = "vLLM runs in the process of the run, without a server"

INERT: Mapping[str, str] = {
    "dataloader_num_workers": _NO_LOADER,
    "dataloader_pin_memory": _NO_LOADER,
    "dataloader_persistent_workers": _NO_LOADER,
    "dataloader_prefetch_factor": _NO_LOADER,
    "dataloader_multiprocessing_context": _NO_LOADER,
    "dataloader_in_order": _NO_LOADER,
    "dataloader_drop_last": "the stream of prompts goes on over the end of an epoch, so no batch is incomplete",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "prediction_loss_only": _NO_METRICS,
    "eval_do_concat_batches": _NO_METRICS,
    "eval_use_gather_object": _NO_METRICS,
    "eval_accumulation_steps": _NO_METRICS,
    "include_for_metrics": _NO_METRICS,
    "batch_eval_metrics": _NO_METRICS,
    "label_names": "completions are their own labels",
    "length_column_name": "batches are not grouped by a length column",
    "logging_nan_inf_filter": "a number that is not finite is logged as it is, and its step is not applied",
    "log_on_each_node": "only the main process of the run logs",
    "include_num_input_tokens_seen": "tokens are always counted (num_tokens)",
    "average_tokens_across_devices": "denominators are always counted over the whole optimizer step and all processes",
    "pad_to_multiple_of": "padding changes no result here, and memory is bounded by tokens",
    "log_multimodal": "prompts carry no images",
    "hub_token": _NO_UPLOAD,
    "hub_private_repo": _NO_UPLOAD,
    "hub_model_id": _NO_UPLOAD,
    "hub_strategy": _NO_UPLOAD,
    "hub_always_push": _NO_UPLOAD,
    "hub_revision": _NO_UPLOAD,
    "vllm_model_impl": _NO_VLLM,
    "vllm_enable_sleep_mode": _NO_VLLM,
    "vllm_server_base_url": _NO_VLLM,
    "vllm_server_host": _NO_VLLM,
    "vllm_server_port": _NO_VLLM,
    "vllm_server_timeout": _NO_VLLM,
    "vllm_group_port": _NO_VLLM,
    "enable_jit_checkpoint": "a stop signal always saves after the step it falls in",
    "restore_callback_states_from_checkpoint": "callbacks always get back on a resume what they remembered",
    "do_train": "transformers keeps it for scripts; train() trains",
    "do_eval": "transformers keeps it for scripts; eval_strategy decides",
    "do_predict": "transformers keeps it for scripts",
    "local_rank": "the launcher says which process this is",
}
"""Options with nothing to act on, and why. Any value is accepted; one that differs from the default is named once."""

SILENT = frozenset({"do_train", "do_eval", "do_predict", "local_rank", "hub_token", "include_num_input_tokens_seen"})
"""Inert options that transformers itself documents as unused or sets by itself: naming them would be noise."""

RETIRED: Mapping[str, str] = {
    "reuse_rollout": "an update always computes its own forward pass",
}
"""Options that runs of earlier versions may have recorded, and what holds now: dropped when such a run is repeated or resumed."""

REFUSED: Mapping[str, str] = {
    "vllm_tensor_parallel_size": "a run's vLLM is on its own device; leave it out",
    "vllm_structured_outputs_regex": "completions cannot be constrained without vLLM; score the format with a reward",
    "use_transformers_continuous_batching": "leave it out: the native sampler already batches continuously",
    "transformers_continuous_batching_config": "leave it out: the native sampler already batches continuously",
    "cache_implementation": "leave it out: the native sampler has its own cache, one copy of the prompt a group",
    "log_completions_hub_repo": "completions stay in the run folder; upload `rollouts/` yourself if you want them public",
    "ds3_gather_for_generation": "it concerns DeepSpeed ZeRO-3, which is not supported yet",
    "cast_lm_head_to_fp32": "log-probabilities are already taken in float32; load the model in float32 for a float32 head",
    "auto_find_batch_size": "set max_tokens_per_microbatch, which bounds memory without changing a gradient",
    "torch_compile": "compiling is not supported yet",
    "torch_compile_backend": "compiling is not supported yet",
    "torch_compile_mode": "compiling is not supported yet",
    "use_liger_kernel": "leave it out: logits are already computed by chunks, see logits_chunk_tokens",
    "liger_kernel_config": "leave it out: Liger kernels are not used",
    "use_cache": "a cache has no use in the learner's forward pass; the sampler always has its own",
    "neftune_noise_alpha": "noise in the embeddings would make the learner another model than the sampler",
    "torch_empty_cache_steps": "emptying the cache is not supported; lower max_tokens_per_microbatch instead",
    "label_smoothing_factor": "there are no labels to smooth in GRPO",
    "optim_target_modules": "GaLore and APOLLO are not supported; use LoRA or an 8-bit optimizer to save memory",
    "bf16_full_eval": "evaluation draws completions with the weights as they are trained",
    "fp16_full_eval": "evaluation draws completions with the weights as they are trained",
    "skip_memory_metrics": "transformers' memory reports are not supported",
    "debug": "transformers' debug modes are not supported",
    "save_on_each_node": "only the main process saves; put output_dir on a disk that every node sees",
    "push_to_hub": "nothing is uploaded by itself; after the run: hf upload YOUR_NAME/MODEL OUTPUT_DIR",
    "ignore_data_skip": "the position in the data is part of a checkpoint and is never replayed",
    "accelerator_config": "batches are shared between processes by Covey itself",
    "parallelism_config": "one model is not split over devices yet",
    "fsdp": "sharding is not supported yet; LoRA and gradient checkpointing save the most memory",
    "fsdp_config": "sharding is not supported yet",
    "deepspeed": "DeepSpeed is not supported yet; LoRA and gradient checkpointing save the most memory",
    "train_sampling_strategy": "use shuffle_dataset: True draws prompts at random, False in the order of the data",
}
"""Options that cannot be honoured, and what to do. Refused when they differ from the default."""

RENAMED: Mapping[str, str] = {
    "use_transformers_paged": "It is use_transformers_continuous_batching in TRL now; leave it out, the native sampler batches so.",
    "vllm_importance_sampling_cap": "Use vllm_importance_sampling_clip_max.",
    "vllm_guided_decoding_regex": "It is vllm_structured_outputs_regex in TRL now.",
    "max_prompt_length": "Prompts are never cut; leave long ones out of the data set.",
    "warmup_ratio": "Use warmup_steps, which takes a share of the run below 1.",
    "evaluation_strategy": "Use eval_strategy.",
    "no_cuda": "Use use_cpu.",
    "logging_dir": "Set the environment variable TENSORBOARD_LOGGING_DIR.",
    "overwrite_output_dir": "A run folder is never overwritten; give a new output_dir or resume the run.",
    "group_by_length": "Memory is bounded by max_tokens_per_microbatch.",
    "per_gpu_train_batch_size": "Use per_device_train_batch_size.",
    "use_liger_loss": "Leave it out: logits are already computed by chunks, see logits_chunk_tokens.",
    "kl_coef": "Use beta.",
    "clip_range": "Use epsilon.",
}
"""Former or foreign names, and what to use."""

ALGORITHM_OPTIONS = (*GROUPS["loss"][1:], *GROUPS["reference model"], "scale_rewards", "multi_objective_aggregation")
"""Options that compose an algorithm; they cannot be given beside one."""


def defaults_of(config_class: Any) -> dict[str, Any]:
    """Default of each field of a dataclass, factories called."""
    made = {}
    for item in fields(config_class):
        made[item.name] = item.default_factory() if item.default_factory is not MISSING else item.default
    return made


def is_changed(name: str, value: Any, default: Any) -> bool:
    """Whether an option differs from its default, whichever way its off is written (None, False, an empty list)."""
    if name == "accelerator_config" and value is not None:
        return bool(_accelerator_options(value) != _accelerator_options({}))
    return bool(value or default) and bool(value != default)


def _accelerator_options(value: Any) -> Any:
    from transformers.trainer_pt_utils import AcceleratorConfig

    if isinstance(value, dict):
        value = AcceleratorConfig(**value)
    return {**vars(value), "use_configured_state": None} if isinstance(value, AcceleratorConfig) else value
