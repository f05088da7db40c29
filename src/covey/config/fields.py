"""Options of TRL and of Covey that transformers' TrainingArguments lacks, each declared once: default, sentence, group, words or range.

A new option is a field here. Light to import: the command line reads this without torch.
"""
# ruff: noqa: RUF009  # `option` is `dataclasses.field`

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from covey.config.option import option

# One line a declaration where it fits, and the fewest where it does not.
# fmt: off


@dataclass(repr=False)
class Options:
    """The fields that `GRPOConfig` adds to TrainingArguments, by group of `covey train --help-all`."""

    # Inherited options with another default, as in TRL; `inherited.py` declares them.
    learning_rate: float = 1e-6
    logging_steps: float = 10
    gradient_checkpointing: bool | None = True
    bf16: bool | None = None
    remove_unused_columns: bool = False

    # Model
    model_init_kwargs: dict[str, Any] | str | None = option(None,
        'Keyword arguments of `from_pretrained` when the model is a name or a folder, such as {"dtype": "bfloat16"}.',
        group="model")
    trust_remote_code: bool = option(False, "Run Python code that comes with a model or tokenizer.", group="model")
    router_aux_loss_coef: float | None = option(None,
        "Weight of a mixture-of-experts model's load-balancing loss; unset: the model's own, 0: off.", group="model",
        at_least=0)
    router_replay: str | None = option(None,
        "Experts in the learner: R3 replays the sampler's choices (rollout routing replay); unset: the router's own.",
        group="model", words=("R3",))
    disable_dropout: bool = option(False, "Switch off dropout in the trained model.", group="model")

    # Data
    shuffle_dataset: bool = option(True, "Draw the prompts of an epoch in a random order, by seed.", group="data")
    chat_template_kwargs: dict[str, Any] | str | None = option(None,
        'Keyword arguments of the tokenizer\'s chat template, such as {"enable_thinking": false}.', group="data")
    group_languages: list[str] | None = option(None,
        "Languages that share a group: each question is asked in all of them, from columns such as prompt_de and answer_de.",
        group="data")
    live_timeout_seconds: float | None = option(None,
        "Most seconds that a run waits for the next prompt of a live source; unset: no limit.", group="data", above=0)
    on_long_prompt: str = option("error",
        "A prompt that, with a completion, does not fit the model's context: error, or drop to leave it out and count it.",
        group="data", words=("error", "drop"))

    # Steps and batches
    num_generations: int = option(8, "Completions of each prompt (G), compared with each other.",
        group="steps and batches", at_least=1)
    generation_batch_size: int | None = option(None,
        "Completions drawn at a time, over all processes; a multiple of the batch per device times processes.",
        group="steps and batches", at_least=1)
    steps_per_generation: int | None = option(None,
        "Micro-batches that share one generation batch; unset: `gradient_accumulation_steps`.",
        group="steps and batches", at_least=1)
    num_iterations: int = option(1, "How often each completion is trained on.", group="steps and batches", at_least=1)
    target_kl: float | None = option(None,
        "Skip the rest of a rollout's updates once the KL from the policy that sampled it (k3, nats a token) is above this.",
        group="steps and batches", above=0, may_be_infinite=True)

    # Sampling
    curriculum: str = option("none",
        "Order of prompts: frontier (prefers prompts that are sometimes solved), or a column, from low to high (-column: high to low). "
        "replay, or +replay after one of these: a quarter of the prompts (replay:0.1: a tenth) are ones that were rarely solved.",
        group="sampling")
    dynamic_sampling: int = option(0,
        "How often further prompts are drawn to replace groups whose rewards are all equal (DAPO); 0: such groups stay.",
        group="sampling", at_least=0)
    max_completion_length: int = option(512, "Most tokens of a completion.", group="sampling", at_least=1)
    temperature: float = option(1.0, "Sampling temperature; log-probabilities are taken at the same temperature.",
        group="sampling", at_least=1e-4, at_most=1e4,
        why="GRPO compares different completions of a prompt; greedy ones are all the same.")
    top_p: float = option(1.0, "Sample from the fewest tokens whose probabilities reach this sum.", group="sampling",
        above=0, at_most=1, why="0 keeps no token; 1 keeps all.")
    top_k: int = option(0, "Sample from the k likeliest tokens; 0: from all.", group="sampling", at_least=0)
    min_p: float | None = option(None, "Sample from tokens at least this likely relative to the likeliest one.",
        group="sampling", at_least=0, at_most=1)
    repetition_penalty: float = option(1.0, "Above 1 makes tokens that occurred before less likely.", group="sampling",
        at_least=1e-4, at_most=1e4)
    generation_kwargs: dict[str, Any] | str | None = option(None,
        "More sampling options by name; they win over the options above.", group="sampling")
    max_tool_calling_iterations: int | None = option(None,
        "Most rounds of tool calls in one completion; unset: no limit.", group="sampling", at_least=0)
    thinking_token_budget: int | None = option(None,
        "Tokens after which thoughts that are still open are closed by </think> or the model's own mark; unset: no limit.",
        group="sampling", at_least=1)
    episode_timeout_seconds: float | None = option(None,
        "Seconds after which a completion with tools ends at its next call; unset: no limit.", group="sampling", above=0)
    agent_timeout_seconds: float = option(600.0,
        "Most seconds of an agent's episode; a later one is lost.", group="sampling", above=0)
    agent_concurrency: int = option(64, "Agents that run at the same time.", group="sampling", at_least=1)
    rollout_backend: str = option("auto",
        "Sampler of completions: native (the trainer's own weights), transformers (`generate`), vllm, or auto.",
        group="sampling", words=("auto", "native", "transformers", "vllm"))
    rollout_dtype: str = option("auto",
        "Type in which a float32 model is sampled: auto (the learner's, by bf16 or fp16), float32, bfloat16, float16.",
        group="sampling", words=("auto", "float32", "bfloat16", "float16"))
    rollout_max_rows: int | None = option(None,
        "Completions that are drawn at once; unset: 256 on a CPU, as many as memory holds on an accelerator.",
        group="sampling", at_least=1)
    rollout_cache_fraction: float = option(0.5, "Share of free memory that keys and values may take while completions are drawn.",
        group="sampling", above=0, at_most=1)
    cuda_graphs: bool | None = option(None, "Replay decode steps as CUDA graphs; unset: on CUDA, where they can be captured.",
        group="sampling")
    attention: str = option("auto",
        "Attention kernels of the native sampler: torch, triton (CUDA), compiled (a CPU with a C++ compiler), or the fastest (auto).",
        group="sampling", words=("auto", "torch", "triton", "compiled"))
    async_rollouts: bool = option(False,
        "Write completions in a separate process while the learner learns, at most `max_staleness` updates ahead.",
        group="sampling")
    max_staleness: int = option(1,
        "Most updates between the weights of a rollout and those that first learn from it; 0: the run without `async_rollouts`, bit for bit.",
        group="sampling", at_least=0)
    pipeline_depth: int = option(1, "Rollouts that are requested ahead of the one in training.", group="sampling",
        at_least=1)
    in_flight_weights: bool = option(True,
        "Continue unfinished completions with new weights; off: each keeps the weights that began it.",
        group="sampling")
    rollout_workers: int = option(1, "Processes, or Ray actors, that share the prompts of asynchronous rollouts.",
        group="sampling", at_least=1)
    rollout_device: str | None = option(None,
        "Device of asynchronous rollouts, such as cuda:1; unset: the CPU, or the GPU behind the learner's where there is one.",
        group="sampling")
    rollout_placement: str = option("process",
        "Where asynchronous rollouts are written: in a process on this machine, or in actors of a Ray cluster (ray).",
        group="sampling", words=("process", "ray"))

    # vLLM
    use_vllm: bool = option(False, "Generate with vLLM.", group="vLLM")
    vllm_mode: str = option("colocate", "Where vLLM runs: colocate or server.", group="vLLM",
        words=("colocate", "server"))
    vllm_gpu_memory_utilization: float = option(0.3, "Share of the GPU's memory for vLLM.", group="vLLM",
        at_least=0, at_most=1)
    vllm_max_model_length: int | None = option(None, "Context length of vLLM.", group="vLLM", at_least=1)
    vllm_tensor_parallel_size: int = option(1, "GPUs of one vLLM engine.", group="vLLM", at_least=1)
    vllm_model_impl: str = option("vllm", "Model implementation inside vLLM.", group="vLLM",
        words=("vllm", "transformers", "auto"))
    vllm_enable_sleep_mode: bool = option(False,
        "Let vLLM in this process give its memory back between rollouts.", group="vLLM")
    vllm_structured_outputs_regex: str | None = option(None,
        "Regular expression that vLLM's completions must match.", group="vLLM")
    vllm_server_base_url: str | None = option(None, "Address of a vLLM server.", group="vLLM")
    vllm_server_host: str = option("0.0.0.0", "Host of a vLLM server; 0.0.0.0 is this machine.", group="vLLM")
    vllm_server_port: int = option(8000, "Port of a vLLM server.", group="vLLM", at_least=1)
    vllm_server_timeout: float = option(240.0, "Seconds to wait for a vLLM server.", group="vLLM", above=0)
    vllm_group_port: int = option(51216, "Port at which the workers of a vLLM server meet a run that broadcasts weights.", group="vLLM", at_least=1)
    vllm_transport: str = option("auto",
        "How weights reach a vLLM server: ipc (memory of one machine or GPU), directory (a folder that both see), gloo or nccl (a broadcast), or auto (the first that works).",
        group="vLLM", words=("auto", "ipc", "directory", "gloo", "nccl"))
    vllm_directory: str | None = option(None,
        "Folder of the versions that a vLLM server reads; unset: `vllm-weights` in output_dir.", group="vLLM")
    vllm_attestation: str = option("stop",
        "If a vLLM server answers with weights other than those sent: stop, warn, or off (nothing is compared).",
        group="vLLM", words=("stop", "warn", "off"))
    vllm_deadlines: dict[str, Any] | str | None = option(None,
        'Time limit in seconds of each phase with a vLLM server, such as {"pause": 60, "update": 120, "bytes_per_second": 1e8}.',
        group="vLLM")

    # Loss
    algorithm: Any = option(None,
        'A preset ("gspo"), your own by import path ("my_ideas.py:mine") or an Algorithm; unset: built from the loss options.',
        group="loss")
    loss_type: str = option("dapo", "Policy loss: grpo, dr_grpo, dapo, bnpo, cispo, sapo, luspo or vespo.",
        group="loss", words=("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"))
    epsilon: float = option(0.2,
        "Lower clip range of the probability ratio; also the upper one unless `epsilon_high` is set.", group="loss",
        at_least=0)
    epsilon_high: float | None = option(None,
        "Upper clip range of the probability ratio (DAPO: 0.28); for cispo it is the bound itself (ScaleRL: 5).",
        group="loss", at_least=0, may_be_infinite=True)
    delta: float | None = option(None,
        "Upper bound of the ratio before clipping, for negative advantages (two-sided clipping).", group="loss",
        above=0, may_be_infinite=True)
    importance_sampling_level: str = option("token",
        "Probability ratio of each token, or of the whole sequence (GSPO).", group="loss", words=("token", "sequence"))
    mask_truncated_completions: bool = option(False,
        "Leave completions that were cut at the length limit out of the loss.", group="loss")
    top_entropy_quantile: float = option(1.0,
        "Train on this share of tokens, those with the highest entropy; 1: on all.", group="loss", at_least=0,
        at_most=1)
    off_policy_mask_threshold: float | None = option(None,
        "Leave out sequences of negative advantage whose KL to the sampler is above this.", group="loss", above=0,
        may_be_infinite=True)
    entropy_coef: float = option(0.0, "Coefficient of the entropy bonus.", group="loss")
    use_adaptive_entropy: bool = option(False,
        "Move `entropy_coef` up while the entropy is below its target, and down otherwise.", group="loss")
    entropy_coef_min: float = option(0.0, "Lowest adaptive entropy coefficient.", group="loss")
    entropy_coef_max: float = option(1.0, "Highest adaptive entropy coefficient.", group="loss")
    entropy_coef_delta: float = option(0.005, "Step of the adaptive entropy coefficient.", group="loss", at_least=0)
    entropy_target: float = option(0.2, "Entropy in nats a token that the adaptive coefficient aims at.", group="loss")
    sapo_temperature_neg: float = option(1.05, "Gate temperature of sapo for advantages of 0 and below.", group="loss",
        above=0)
    sapo_temperature_pos: float = option(1.0, "Gate temperature of sapo for advantages above 0.", group="loss", above=0)
    vespo_k_pos: float = option(2.0, "Power of vespo's weight for positive advantages.", group="loss")
    vespo_lambda_pos: float = option(3.0, "Decay of vespo's weight for positive advantages.", group="loss")
    vespo_k_neg: float = option(3.0, "Power of vespo's weight for negative advantages.", group="loss")
    vespo_lambda_neg: float = option(2.0, "Decay of vespo's weight for negative advantages.", group="loss")

    # Reference model
    beta: float = option(0.0, "KL coefficient against the reference model; 0: no reference model is kept.",
        group="reference model", at_least=0)
    use_bias_correction_kl: bool = option(True,
        "Weigh the KL term by the probability ratio, which makes its gradient unbiased.", group="reference model")
    sync_ref_model: bool = option(False, "Let the reference model follow the trained one (TR-DPO).",
        group="reference model")
    ref_model_mixup_alpha: float = option(0.6, "Share of the trained model in each update of the reference.",
        group="reference model", at_least=0, at_most=1)
    ref_model_sync_steps: int = option(512, "Optimizer steps between updates of the reference.",
        group="reference model", at_least=1)

    # Rewards
    reward_weights: list[float] | None = option(None,
        "Weight of each reward function, in their order: a number or a schedule such as linear:1:0:200; unset: 1 each.",
        group="rewards")
    scale_rewards: str = option("group",
        "Divide advantages by the standard deviation of the group, of the batch, or not at all (none).",
        group="rewards", words=("group", "batch", "none"), also=(True, False))
    multi_objective_aggregation: str = option("sum_then_normalize",
        "Sum rewards, then normalize in the group; or normalize each first (normalize_then_sum, GDPO).",
        group="rewards", words=("sum_then_normalize", "normalize_then_sum"))
    reward_timeout_seconds: float | None = option(180.0,
        "Time limit in seconds of one call of a reward function, such as a judge over 512 completions; null: no limit.", group="rewards", above=0,
        may_be_infinite=True, why="None sets no limit.")
    on_reward_error: str = option("record", "A reward that fails: record it and leave the completion out, or raise.",
        group="rewards", words=("record", "raise"))
    advantage_slices: str | None = option(None,
        "Column such as language: advantages are divided by the deviation of all completions of one value; small slices are pooled.",
        group="rewards")
    metrics_by: list[str] | None = option(None,
        "Columns by whose values reward, length, truncation and accuracy are logged too, with intervals, such as language or dataset.",
        group="rewards")
    reward_error_limit: int = option(20, "Failures of rewards in a row before the run stops with a checkpoint.",
        group="rewards", at_least=1)
    server_timeout: float = option(240.0,
        "Seconds to wait, before the run, for the server of a judge, teacher or ensemble member that starts; 0: it has to be up.",
        group="rewards", at_least=0)
    reward_workers: int = option(0,
        "Worker processes for each of your own reward functions, killed past the time limit; 0: call it in this process.",
        group="rewards", at_least=0)
    reward_normalization: str = option("none",
        "Put each reward on a common scale first: by its group, its batch, running statistics, or not at all (none).",
        group="rewards", words=("none", "group", "batch", "running"))
    reward_clip: list[float] | None = option(None, "Lowest and highest value of each reward, after its normalization.",
        group="rewards")

    # Sampler and learner
    vllm_importance_sampling_correction: bool = option(True,
        "Correct for the difference between the sampler's and the learner's log-probabilities, whatever the sampler.",
        group="sampler and learner")
    vllm_importance_sampling_mode: str = option("sequence_mask",
        "How: token or sequence ratios, truncated to the bounds or masked outside them, such as token_truncate.",
        group="sampler and learner", words=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))
    vllm_importance_sampling_clip_max: float | None = option(3.0, "Upper bound of the correction.",
        group="sampler and learner", at_least=0, may_be_infinite=True)
    vllm_importance_sampling_clip_min: float | None = option(None, "Lower bound of the correction.",
        group="sampler and learner", at_least=0, may_be_infinite=True)
    vllm_importance_sampling_cap: float | None = option(None, "Former name of vllm_importance_sampling_clip_max.",
        group="sampler and learner", at_least=0, may_be_infinite=True)

    # Numbers gone bad
    on_bad_numbers: str = option("skip",
        "After a NaN or infinite loss or gradient, whose update is always skipped: continue (skip), roll_back to a checkpoint, or stop.",
        group="numbers gone bad", words=("skip", "roll_back", "stop"))
    on_spike: str = option("log",
        "A gradient norm or KL far above its recent values: log it, clip to the usual norm, skip the update, roll_back, or stop.",
        group="numbers gone bad", words=("log", "clip", "skip", "roll_back", "stop"))
    spike_threshold: float = option(8.0,
        "Robust standard deviations (of the logarithm, over the last 100 steps) that make a spike.",
        group="numbers gone bad", above=0, may_be_infinite=True)
    bad_steps_limit: int = option(3, "Skipped updates in a row before the run returns to a checkpoint, or stops.",
        group="numbers gone bad", at_least=1)
    roll_backs_limit: int = option(2, "How often a run returns to a checkpoint before it stops.",
        group="numbers gone bad", at_least=0)
    roll_back_learning_rate: float = option(0.5,
        "Factor on the learning rate each time a run returns to a checkpoint, or an alert lowers it.",
        group="numbers gone bad", above=0)

    # Alerts
    alert_actions: dict[str, Any] | str | None = option(None,
        'What follows an alert, by its rule, its severity or "all": log, off, lower_learning_rate, roll_back or stop.',
        group="alerts")
    alert_webhook: str | None = option(None, "Address that every alert is posted to as JSON.", group="alerts")
    alert_detectors: list[Any] | None = option(None,
        'Alert detectors of your own, by import path ("my_alerts.py:too_polite") or as functions of a history.',
        group="alerts")
    audit_metrics: list[str] | None = option(None,
        "Metrics that must not fall while the reward rises, in addition to eval_reward and rewards of weight 0.",
        group="alerts")

    # Evaluation
    num_generations_eval: int | None = option(None,
        "Completions of each prompt in evaluation; unset: `num_generations`.", group="evaluation", at_least=1)
    early_stopping_patience: int | None = option(None,
        "Evaluations without a better `metric_for_best_model` before the run stops.", group="evaluation", at_least=1)
    ema_decay: float | None = option(None,
        "Keep an exponential moving average of the weights with this decay; the average is evaluated, and the run ends with it.",
        group="evaluation", at_least=0, at_most=1)
    soup_steps: int | None = option(None,
        "Average the weights after every N steps instead; the average is evaluated, and the run ends with it.",
        group="evaluation", at_least=1)

    # Output
    save_async: bool = option(True,
        "Write checkpoints while training continues, from a copy in host memory; false: wait for the disk.",
        group="output")
    save_error_limit: int | None = option(None,
        "Failed saves in a row before the run stops (exit code 74); unset: it never stops for them.",
        group="output", at_least=1)
    rollout_log_steps: int = option(10,
        "Write prompts, completions, rewards and advantages to `rollouts/` every N steps; 0: never.",
        group="output", at_least=0)
    rollout_total_limit: int | None = option(10_000,
        "Most files in `rollouts/`; beyond it every second file of the older half is deleted, so early steps thin out.",
        group="output", at_least=4)
    log_completions: bool = option(False, "Show a sample of completions at each log, also as a table in W&B and Trackio.",
        group="output")
    num_completions_to_print: int | None = option(None,
        "How many completions `log_completions` shows; unset: all of the step.", group="output", at_least=1)
    log_unique_prompts: bool = option(False, "Show each prompt once in `log_completions`.", group="output")
    log_multimodal: bool = option(
        True, "Store small copies of the images, sounds and videos of recorded prompts in `rollouts/`.", group="output")

    # Memory, precision and devices
    activation_offloading: bool = option(False,
        "Keep activations in the host's memory between forward and backward; for accelerators.",
        group="memory, precision and devices")
    checkpoint_when_needed: bool = option(False,
        "Begin without gradient checkpointing, and switch it on once a single completion does not fit in memory.",
        group="memory, precision and devices")
    max_tokens_per_microbatch: int | str | None = option("auto",
        "Most tokens of one forward pass, shared prompts counted once: a number, null, or auto; changes memory, not gradients.",
        group="memory, precision and devices", at_least=1, also=("auto",))
    logits_chunk_tokens: int | None = option(None,
        "Tokens whose logits exist at a time; unset: by the size of the vocabulary. Changes memory and speed, not results.",
        group="memory, precision and devices", at_least=1)
    shared_attention: str = option("auto",
        "Attention of completions to their shared prompt: flex (FlexAttention, CUDA), sdpa (by part), or auto (flex where it works).",
        group="memory, precision and devices", words=("auto", "flex", "sdpa"))
    cast_lm_head_to_fp32: bool = option(False,
        "Compute the output layer in float32, whatever the type of the rest: policy, reference and sampler (not vLLM's).",
        group="memory, precision and devices")

    # TRL's, without effect here
    pad_to_multiple_of: int | str | None = option("auto", "Pad to a multiple of this many tokens.",
        inert="padding changes no result here, and memory is bounded by tokens")
    cache_implementation: str | None = option(None, "Cache class of transformers' `generate`.",
        inert="the native sampler has its own cache, one copy of the prompt a group")
    use_transformers_continuous_batching: bool = option(False, "Generate with transformers' continuous batching.",
        inert="the native sampler always batches continuously")
    use_transformers_paged: bool = option(False, "Former name of use_transformers_continuous_batching.",
        inert="the native sampler always batches continuously")
    transformers_continuous_batching_config: dict[str, Any] | str | None = option(None,
        "Options of transformers' continuous batching.", inert="the native sampler always batches continuously")

    # TRL's, refused
    ds3_gather_for_generation: bool = option(True, "Gather DeepSpeed ZeRO-3 weights for generation.",
        refused="weights that are split are always gathered once a rollout; leave it out")
    log_completions_hub_repo: str | None = option(None, "Upload completions to this repository on the Hub.",
        refused="completions stay in the run folder; upload `rollouts/` yourself if you want them public")
