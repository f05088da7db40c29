"""Every option of a run: TRL's names and defaults, and a few of Covey's own. Each has one sentence, and acts or is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from covey.config import bounds, checks, options
from covey.config.batches import Arithmetic, arithmetic
from covey.errors import ConfigError, did_you_mean
from covey.names import refuse_text_for_yes
from covey.process.lean import TrainingArguments
from covey.process.world import is_on_cpu_with_others, join


@dataclass(repr=False)
class GRPOConfig(TrainingArguments):
    """Options of a GRPO run: a flat dataclass with TRL 1.16's names and defaults on top of transformers' TrainingArguments.

    An option that is accepted is honoured; one that cannot be is refused with a sentence that says what to do, at
    construction. `options.py` holds the table, `checks.py` the rules.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012  transformers declares it so: names whose JSON text becomes a dict
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "alert_actions",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]

    # Inherited options with another default, as in TRL.
    learning_rate: float = 1e-6
    """Peak learning rate; full fine-tuning wants about 1e-6, LoRA ten to a hundred times more."""
    logging_steps: float = 10
    """Log every so many optimizer steps; below 1 it is a share of the whole run."""
    gradient_checkpointing: bool | None = True
    """Compute activations again in the backward pass: less memory, about a third more computing."""
    bf16: bool | None = None  # type: ignore[assignment]  # unset until the machine is known, as in TRL
    """Compute in bfloat16; unset: yes where the accelerator has it (unless fp16 is set), float32 on a CPU."""
    remove_unused_columns: bool = False
    """Give rewards the prompt only, without the other columns of the data set."""

    # Model
    model_init_kwargs: dict[str, Any] | str | None = None
    """Keyword arguments of `from_pretrained` when the model is a name or a folder, such as {"dtype": "bfloat16"}."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model or tokenizer."""
    router_aux_loss_coef: float | None = None
    """Weight of a mixture-of-experts model's load-balancing loss; unset: the model's own, 0: off."""
    disable_dropout: bool = False
    """Switch dropout off in the trained model."""
    cast_lm_head_to_fp32: bool = False
    """Keep the output layer of the trained and the reference model in float32."""

    # Data
    num_generations: int = 8
    """Completions of each prompt (G), judged against each other."""
    num_generations_eval: int | None = None
    """Completions of each prompt in evaluation; unset: `num_generations`."""
    max_completion_length: int = 512
    """Most tokens of a completion."""
    shuffle_dataset: bool = True
    """Draw the prompts of an epoch in a random order, by seed."""
    pad_to_multiple_of: int | str | None = "auto"
    """Pad to a multiple of so many tokens."""
    ds3_gather_for_generation: bool = True
    """Gather DeepSpeed ZeRO-3 weights for generation."""

    # Sampling
    generation_batch_size: int | None = None
    """Completions drawn at a time, over all processes; a multiple of the batch per device times processes."""
    steps_per_generation: int | None = None
    """Micro-batches that share one generation batch; unset: `gradient_accumulation_steps`."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities are taken at the same temperature."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0: from all."""
    min_p: float | None = None
    """Sample from tokens at least this likely relative to the likeliest one."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that occurred before less likely."""
    generation_kwargs: dict[str, Any] | str | None = None
    """More sampling options by name; they win over the options above."""
    chat_template_kwargs: dict[str, Any] | str | None = None
    """Keyword arguments of the tokenizer's chat template, such as {"enable_thinking": false}."""
    cache_implementation: str | None = None
    """Cache class of transformers' `generate`."""
    use_transformers_continuous_batching: bool = False
    """Generate with transformers' continuous batching."""
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    """Options of transformers' continuous batching."""
    max_tool_calling_iterations: int | None = None
    """Most times that tools are called in one completion; unset: no limit."""

    # vLLM
    use_vllm: bool = False
    """Generate with vLLM."""
    vllm_mode: str = "colocate"
    """Where vLLM runs: colocate or server."""
    vllm_model_impl: str = "vllm"
    """Model implementation inside vLLM."""
    vllm_enable_sleep_mode: bool = False
    """Let vLLM sleep during the optimizer step."""
    vllm_structured_outputs_regex: str | None = None
    """Regular expression that vLLM's completions must match."""
    vllm_server_base_url: str | None = None
    """Address of a vLLM server."""
    vllm_server_host: str = "0.0.0.0"
    """Host of a vLLM server."""
    vllm_server_port: int = 8000
    """Port of a vLLM server."""
    vllm_server_timeout: float = 240.0
    """Seconds to wait for a vLLM server."""
    vllm_group_port: int = 51216
    """Port on which weights reach a vLLM server."""
    vllm_gpu_memory_utilization: float = 0.3
    """Share of the GPU's memory for vLLM."""
    vllm_max_model_length: int | None = None
    """Context length of vLLM."""
    vllm_tensor_parallel_size: int = 1
    """GPUs of one vLLM engine."""

    # Loss
    beta: float = 0.0
    """KL coefficient against the reference model; 0: no reference model is kept."""
    num_iterations: int = 1
    """How often each completion is trained on."""
    epsilon: float = 0.2
    """Lower clip range of the probability ratio; also the upper one unless `epsilon_high` is set."""
    epsilon_high: float | None = None
    """Upper clip range of the probability ratio (DAPO: 0.28); for cispo it is the bound itself (ScaleRL: 5)."""
    delta: float | None = None
    """Upper bound of the ratio before clipping, for negative advantages (two-sided clipping)."""
    loss_type: str = "dapo"
    """Policy loss: grpo, dr_grpo, dapo, bnpo, cispo, sapo, luspo or vespo."""
    importance_sampling_level: str = "token"
    """Probability ratio of each token, or of the whole sequence (GSPO)."""
    sapo_temperature_neg: float = 1.05
    """Gate temperature of sapo for advantages of 0 and below."""
    sapo_temperature_pos: float = 1.0
    """Gate temperature of sapo for advantages above 0."""
    vespo_k_pos: float = 2.0
    """Power of vespo's weight for positive advantages."""
    vespo_lambda_pos: float = 3.0
    """Decay of vespo's weight for positive advantages."""
    vespo_k_neg: float = 3.0
    """Power of vespo's weight for negative advantages."""
    vespo_lambda_neg: float = 2.0
    """Decay of vespo's weight for negative advantages."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut at the length limit out of the loss."""
    top_entropy_quantile: float = 1.0
    """Train on this share of tokens, those with the highest entropy; 1: on all."""
    off_policy_mask_threshold: float | None = None
    """Leave out sequences of negative advantage whose KL to the sampler is above this."""
    use_bias_correction_kl: bool = True
    """Weigh the KL term by the probability ratio, which makes its gradient unbiased."""

    # Entropy
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    use_adaptive_entropy: bool = False
    """Move `entropy_coef` up while the entropy is below its target, and down otherwise."""
    entropy_coef_min: float = 0.0
    """Lowest adaptive entropy coefficient."""
    entropy_coef_max: float = 1.0
    """Highest adaptive entropy coefficient."""
    entropy_coef_delta: float = 0.005
    """Step of the adaptive entropy coefficient."""
    entropy_target: float = 0.2
    """Entropy in nats a token that the adaptive coefficient aims at."""

    # Rewards
    reward_weights: list[float] | None = None
    """Weight of each reward function, in their order: a number or a schedule such as linear:1:0:200; unset: 1 each."""
    multi_objective_aggregation: str = "sum_then_normalize"
    """Sum rewards, then normalize in the group; or normalize each first (normalize_then_sum, GDPO)."""
    scale_rewards: str = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or not at all (none)."""

    # Reference model
    sync_ref_model: bool = False
    """Let the reference model follow the trained one (TR-DPO)."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the trained model in each update of the reference."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between updates of the reference."""

    # Correction between sampler and learner
    vllm_importance_sampling_correction: bool = True
    """Correct for the difference between the sampler's and the learner's log-probabilities, whatever the sampler."""
    vllm_importance_sampling_mode: str = "sequence_mask"
    """How: token or sequence ratios, truncated to the bounds or masked outside them, such as token_truncate."""
    vllm_importance_sampling_clip_max: float | None = 3.0
    """Upper bound of the correction."""
    vllm_importance_sampling_clip_min: float | None = None
    """Lower bound of the correction."""

    # Logging
    log_completions: bool = False
    """Show a sample of completions at each log."""
    num_completions_to_print: int | None = None
    """How many completions `log_completions` shows; unset: all of the step."""
    log_unique_prompts: bool = False
    """Show each prompt once in `log_completions`."""
    log_multimodal: bool = True
    """Log images with completions."""
    log_completions_hub_repo: str | None = None
    """Upload completions to this repository on the Hub."""

    # Covey's own
    algorithm: Any = None
    """A preset ("gspo"), your own by import path ("my_ideas.py:mine") or an Algorithm; unset: built from the loss options."""
    rollout_dtype: str = "auto"
    """What a CPU samples a float32 model in: auto (bfloat16 with bf16=True, and where it pays), float32, bfloat16."""
    rollout_backend: str = "auto"
    """What draws completions: native (the trainer's own weights), transformers (`generate`), vllm, or auto."""
    reward_timeout_seconds: float | None = 60.0
    """Most seconds of one call of a reward function; unset by `null`: no limit."""
    reward_error_limit: int = 20
    """Failures of rewards in a row before the run stops with a checkpoint."""
    reward_workers: int = 0
    """Run each reward function of your own in so many worker processes, killed past the time limit; 0: in this process."""
    reward_normalization: str = "none"
    """Put each reward on a common scale first: by its group, its batch, running statistics, or not at all (none)."""
    reward_clip: list[float] | None = None
    """Lowest and highest value of each reward, after its normalization."""
    on_reward_error: str = "record"
    """A reward that fails: record it and leave the completion out, or raise."""
    max_tokens_per_microbatch: int | str | None = "auto"
    """Most tokens of one forward pass, shared prompts counted once: a number, null, or auto; changes memory, no gradient."""
    checkpoint_when_needed: bool = False
    """Begin without gradient checkpointing, and switch it on once a single completion does not fit in memory."""
    activation_offloading: bool = False
    """Keep activations in the host's memory between forward and backward; for accelerators."""
    shared_attention: str = "auto"
    """Attention of completions behind their shared prompt: flex (FlexAttention, CUDA), sdpa (by part), or auto (flex where it works)."""
    logits_chunk_tokens: int | None = None
    """Tokens whose logits exist at a time, by the vocabulary unless set; changes memory and speed, no value."""
    curriculum: str = "none"
    """Order of prompts: frontier (most often those that are solved sometimes), or a column, from low to high (-column: high to low).
    replay, or +replay after one of these: a quarter of the prompts (replay:0.1: a tenth) are ones that were solved rarely."""
    dynamic_sampling: int = 0
    """Times that further prompts are drawn in place of groups whose rewards are all equal (DAPO); 0: such groups stay."""
    on_long_prompt: str = "error"
    """A prompt that does not fit beside a completion in the model's context: error, or drop to leave it out and count it."""
    on_bad_numbers: str = "skip"
    """NaN or infinite loss or gradient, whose update is always left out: go on (skip), roll_back to a checkpoint, or stop."""
    on_spike: str = "log"
    """A gradient norm or KL far above its recent values: log it, clip to the usual norm, skip the update, roll_back, or stop."""
    spike_threshold: float = 8.0
    """Robust standard deviations (of the logarithm, over the last 100 steps) that make a spike."""
    bad_steps_limit: int = 3
    """Updates left out in a row before the run goes back to a checkpoint, or stops."""
    roll_backs_limit: int = 2
    """Times that a run goes back to a checkpoint before it stops."""
    roll_back_learning_rate: float = 0.5
    """Factor on the learning rate each time a run goes back to a checkpoint, or an alert lowers it."""
    alert_actions: dict[str, Any] | str | None = None
    """What follows an alert, by its rule, its severity or "all": log, off, lower_learning_rate, roll_back or stop."""
    alert_webhook: str | None = None
    """Address that every alert is posted to as JSON."""
    alert_detectors: list[Any] | None = None
    """Alert detectors of your own, by import path ("my_alerts.py:too_polite") or as functions of a history."""
    audit_metrics: list[str] | None = None
    """Metrics that must not fall while the reward rises, beside eval_reward and rewards of weight 0."""
    metrics_by: list[str] | None = None
    """Columns of the data set by whose values the reward is logged too, such as language or dataset."""
    early_stopping_patience: int | None = None
    """Evaluations without a better `metric_for_best_model` before the run stops."""
    save_async: bool = True
    """Write checkpoints beside the steps that follow, from a copy in the host's memory; false: wait for the disk."""
    save_error_limit: int | None = None
    """Saves in a row that the disk may refuse before the run stops (exit code 74); unset: it never stops for them."""
    rollout_log_steps: int = 10
    """Write prompts, completions, rewards and advantages to `rollouts/` every so many steps; 0: never."""
    rollout_total_limit: int | None = 10_000
    """Most files in `rollouts/`: beyond it every second one of the older half goes, so that early steps stay, ever more thinly."""

    def __new__(cls, *args: Any, **given: Any) -> GRPOConfig:
        """Refuse names that are not options before dataclass machinery sees them."""
        known = {item.name for item in fields(cls)}
        for name in given:
            if name not in known:
                renamed = options.RENAMED.get(name)
                hint = f" {renamed}" if renamed else did_you_mean(name, known)
                raise ConfigError(f"{name} is not an option of GRPOConfig.{hint}")
        return super().__new__(cls)

    def to_json_string(self) -> str:
        """As trackers log it; an algorithm or a detector that is an object is written as its `repr`."""
        return json.dumps(self.to_dict(), indent=2, default=repr)

    def __post_init__(self) -> None:
        try:
            self._settle()
        except ConfigError:
            raise
        except (TypeError, AttributeError, LookupError, OverflowError, ValueError) as error:
            raise ConfigError(checks.misfit(vars(self), get_type_hints(type(self)), error)) from error

    def _settle(self) -> None:
        """Check everything, and fill in what follows from the rest."""
        given = self._changed()
        checks.refuse_unsupported(given)
        checks.refuse_bad_words(self)
        checks.refuse_bad_factories(self)
        checks.normalize(self)
        refuse_text_for_yes(self)
        bounds.refuse_bad_numbers(self)
        checks.refuse_contradictions(self, given)
        checks.warn_of_levels(self)
        checks.settle_precision(self)
        checks.settle_sampler(self, given)
        self.use_cpu = self.use_cpu or is_on_cpu_with_others()
        join(cpu=self.use_cpu, backend=self.ddp_backend, seconds=self.ddp_timeout)  # before transformers would
        try:
            super().__post_init__()
        except (
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
        ) as error:  # what transformers says of its own options
            raise ConfigError(str(error)) from error
        checks.refuse_bad_alerts(self)
        checks.settle_batches(self)
        checks.warn_inert(given)

    @property
    def checkpoints_activations(self) -> bool:
        """Whether activations are computed again from the start."""
        return bool(self.gradient_checkpointing) and not self.checkpoint_when_needed

    def _changed(self) -> dict[str, Any]:
        """Options that differ from their defaults, by name."""
        return {
            name: vars(self)[name]
            for name, default in options.defaults_of(type(self)).items()
            if options.is_changed(name, vars(self)[name], default)
        }


def batch_arithmetic(config: GRPOConfig, world_size: int | None = None, num_prompts: int | None = None) -> Arithmetic:
    """How prompts, completions and optimizer steps of a run relate.

    `world_size` None: the processes that run now. `num_prompts` None: a stream without end, which needs `max_steps`.
    Raises ConfigError with the numbers and what to change where they do not fit together.
    """
    return arithmetic(
        per_device_batch=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        world_size=config.world_size if world_size is None else world_size,
        steps_per_generation=config.steps_per_generation,
        generation_batch_size=None,
        num_generations=config.num_generations,
        num_iterations=config.num_iterations,
        max_steps=config.max_steps,
        num_epochs=config.num_train_epochs,
        num_prompts=num_prompts,
    )
