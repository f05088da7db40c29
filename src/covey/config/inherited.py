"""Options that GRPOConfig inherits from transformers' TrainingArguments: sentence, group and range, or why they do not act."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from covey.config.option import Option

_ACTING: Mapping[str, Mapping[str, Option]] = {
    "data": {
        "remove_unused_columns": Option("Give rewards the prompt only, without the other columns of the data set."),
    },
    "steps and batches": {
        "max_steps": Option("Optimizer steps; -1: as many as `num_train_epochs` takes."),
        "num_train_epochs": Option("Passes over the prompts, when `max_steps` is not set."),
        "per_device_train_batch_size": Option(
            "Completions of a batch on each device; on a GPU, `max_tokens_per_microbatch` alone limits one forward pass.",
            at_least=1,
            is_whole=True,
        ),
        "gradient_accumulation_steps": Option("Micro-batches of an optimizer step.", at_least=1, is_whole=True),
    },
    "optimizer": {
        "learning_rate": Option(
            "Peak learning rate; full fine-tuning wants about 1e-6, LoRA ten to a hundred times more.", at_least=0
        ),
        "lr_scheduler_type": Option("How the learning rate moves: linear, cosine, constant, constant_with_warmup, ..."),
        "lr_scheduler_kwargs": Option('More arguments of the scheduler, such as {"num_cycles": 1}.'),
        "warmup_steps": Option(
            "Steps in which the learning rate rises from 0; below 1 it is a share of the run.", at_least=0
        ),
        "optim": Option(
            "Optimizer by transformers' name: adamw_torch_fused (the default), adamw_8bit, adafactor, sgd, ..."
        ),
        "optim_args": Option('More arguments of the optimizer, as "name=value,name=value".'),
        "weight_decay": Option("Weight decay, except of biases and norms.", at_least=0),
        "adam_beta1": Option("Decay of Adam's first moment.", at_least=0, below=1),
        "adam_beta2": Option("Decay of Adam's second moment.", at_least=0, below=1),
        "adam_epsilon": Option("Adam's epsilon.", above=0),
        "max_grad_norm": Option(
            "Clip the gradient to this norm; 0: never.", at_least=0, may_be_infinite=True, is_optional=True
        ),
    },
    "evaluation": {
        "eval_strategy": Option("When to evaluate: no, steps or epoch.", words=("no", "steps", "epoch")),
        "eval_steps": Option(
            "Optimizer steps between evaluations; unset: `logging_steps`; below 1 it is a share of the run."
        ),
        "eval_delay": Option("Steps or epochs before the first evaluation.", at_least=0, is_optional=True),
        "eval_on_start": Option("Evaluate before the first step."),
        "per_device_eval_batch_size": Option(
            "Completions whose loss is computed at a time on each device in evaluation. `eval_loss` is the mean over these batches, each by its completions.",
            at_least=1,
            is_whole=True,
        ),
        "metric_for_best_model": Option("Evaluation metric that picks the best checkpoint; unset: reward."),
        "greater_is_better": Option("Whether more of that metric is better; unset: yes, unless its name ends in loss."),
        "load_best_model_at_end": Option("End with the weights of the best checkpoint."),
    },
    "output": {
        "output_dir": Option(
            "Folder of this run: checkpoints, metrics, rollouts; it must be new, empty, or this run's own."
        ),
        "save_strategy": Option(
            "When to save a checkpoint: no, steps, epoch or best.", words=("no", "steps", "epoch", "best")
        ),
        "save_steps": Option("Optimizer steps between checkpoints; below 1 it is a share of the run."),
        "save_total_limit": Option("Most checkpoints to keep; the best one always stays."),
        "save_only_model": Option("Save weights only, without what a resume needs."),
        "resume_from_checkpoint": Option("Checkpoint to resume from, unless `train()` gets another one."),
        "report_to": Option("Trackers by name: tensorboard, wandb, trackio, mlflow, ..., or none."),
        "run_name": Option("Name of the run in trackers."),
        "project": Option("Name of the project in Trackio."),
        "trackio_space_id": Option("Hugging Face Space of Trackio's live page."),
        "trackio_bucket_id": Option("Bucket of that Space."),
        "trackio_static_space_id": Option("Static Space of Trackio."),
        "logging_strategy": Option("When to log: no, steps or epoch.", words=("no", "steps", "epoch")),
        "logging_steps": Option("Log every so many optimizer steps; below 1 it is a share of the whole run."),
        "logging_first_step": Option("Log the first step too."),
        "log_level": Option("How much the main process says: debug, info, warning, error, critical or passive."),
        "log_level_replica": Option("The same for the other processes."),
        "disable_tqdm": Option("Show no live progress line."),
    },
    "hub": {
        "push_to_hub": Option(
            "Upload the model, its tokenizer and a model card to the Hugging Face hub, when hub_strategy says."
        ),
        "hub_model_id": Option("Repository on the hub; unset: your own, named as output_dir is."),
        "hub_strategy": Option(
            "Upload at the end, at every_save, with the newest whole checkpoint, or with all_checkpoints."
        ),
        "hub_token": Option("Token that may write there; unset: the one of `hf auth login`."),
        "hub_private_repo": Option("Make the repository private where it is made; unset: the hub's default."),
        "hub_always_push": Option("Begin an upload even while the one before goes on."),
        "hub_revision": Option("Branch of the repository to upload to; unset: main."),
    },
    "memory, precision and devices": {
        "bf16": Option(
            "Compute in bfloat16; unset: yes where the accelerator has it (unless fp16 is set), float32 on a CPU."
        ),
        "fp16": Option("Compute in float16 with loss scaling, on accelerators without bfloat16."),
        "tf32": Option("Let matrix products on Ampere and newer use TF32."),
        "gradient_checkpointing": Option(
            "Compute activations again in the backward pass: less memory, about a third more computing."
        ),
        "gradient_checkpointing_kwargs": Option("The former name of `activation_checkpointing_kwargs`."),
        "activation_checkpointing": Option(
            "The new name of `gradient_checkpointing` in transformers; it wins when set."
        ),
        "activation_checkpointing_kwargs": Option("Arguments of activation checkpointing."),
        "use_cpu": Option("Use the CPU even where there is an accelerator."),
        "seed": Option("Seed of everything random.", at_least=0, at_most=2**32 - 1, is_whole=True),
        "data_seed": Option(
            "Seed of the order of prompts; unset: `seed`.",
            at_least=0,
            at_most=2**32 - 1,
            is_whole=True,
            is_optional=True,
        ),
        "full_determinism": Option("Force deterministic kernels; slower."),
    },
    "several processes": {
        "ddp_backend": Option("Communication backend between processes: nccl, gloo, ..."),
        "ddp_timeout": Option("Seconds that processes wait for each other.", at_least=1, is_whole=True),
        "fsdp": Option("Split parameters, gradients and optimizer state over the processes (FSDP2).", bare="true"),
        "fsdp_config": Option("How they are split: a dict, or the path of a JSON file."),
        "deepspeed": Option("A ZeRO-2 or ZeRO-3 configuration, which FSDP2 carries out."),
        "parallelism_config": Option(
            "Share out the tokens of each row over processes (context parallelism), as in {'cp_size': 2}."
        ),
    },
}

_INERT: Mapping[str, tuple[str, ...]] = {
    "prompts are read in the training process, which is never the slow part": (
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "dataloader_in_order",
    ),
    "the stream of prompts continues past the end of an epoch, so no batch is incomplete": ("dataloader_drop_last",),
    "gradients are summed once an optimizer step, without a DistributedDataParallel wrapper": (
        "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
    ),
    "evaluation draws completions and scores them with the rewards; there is no compute_metrics": (
        "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
        "batch_eval_metrics",
    ),
    "completions are their own labels": ("label_names",),
    "batches are not grouped by a length column": ("length_column_name",),
    "a number that is not finite is logged as it is, and its step is not applied": ("logging_nan_inf_filter",),
    "only the main process of the run logs": ("log_on_each_node",),
    "tokens are always counted (num_tokens)": ("include_num_input_tokens_seen",),
    "denominators are always counted over the whole optimizer step and all processes": ("average_tokens_across_devices",),
    "a stop signal is heeded between tokens and between micro-batches, and always saves the state after the last whole step": ("enable_jit_checkpoint",),
    "callbacks always get their state back on a resume": ("restore_callback_states_from_checkpoint",),
    "transformers keeps it for scripts; train() trains": ("do_train",),
    "transformers keeps it for scripts; eval_strategy decides": ("do_eval",),
    "transformers keeps it for scripts": ("do_predict",),
    "the launcher says which process this is": ("local_rank",),
    "what pays is compiled by itself on a GPU (docs/gpu.md); the model is not": ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    "logits are already computed by chunks, see logits_chunk_tokens": ("use_liger_kernel", "liger_kernel_config"),
    "memory is bounded by max_tokens_per_microbatch, and a step that runs out of it is repeated in smaller parts": (
        "auto_find_batch_size", "torch_empty_cache_steps",
    ),
    "the learner's forward pass needs no cache; the sampler always has its own": ("use_cache",),
    "evaluation draws completions with the weights in training": ("bf16_full_eval", "fp16_full_eval"),
    "memory is always in the log": ("skip_memory_metrics",),
    "numbers that are not finite are always detected": ("debug",),
    "only the main process saves; put output_dir on a disk that every node sees": ("save_on_each_node",),
    "the position in the data is part of a checkpoint and is never replayed": ("ignore_data_skip",),
    "batches are shared between processes by Covey itself": ("accelerator_config",),
}  # fmt: skip
"""Options without effect, by the reason."""

_SILENT = frozenset({"do_train", "do_eval", "do_predict", "local_rank", "include_num_input_tokens_seen"})
"""Options that transformers documents as unused or sets itself: naming them would be noise."""

_REFUSED: Mapping[str, str] = {
    "neftune_noise_alpha": "noise in the embeddings would make the learner another model than the sampler",
    "label_smoothing_factor": "there are no labels to smooth in GRPO",
    "optim_target_modules": "GaLore and APOLLO are not supported; use LoRA or an 8-bit optimizer to save memory",
    "train_sampling_strategy": "use shuffle_dataset: True draws prompts at random, False in the order of the data",
}

INHERITED: Mapping[str, Option] = {
    **{
        name: replace(option, group=group)
        for group, group_options in _ACTING.items()
        for name, option in group_options.items()
    },
    **{name: Option(inert=why, is_silent=name in _SILENT) for why, names in _INERT.items() for name in names},
    **{name: Option(refused=why) for name, why in _REFUSED.items()},
}
"""Declarations by name. Some fields exist only in newer versions of transformers."""
