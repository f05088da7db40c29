"""Construction of the parts of a run: the only reader of the whole configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, cast

import torch

from covey.algorithms import Algorithm
from covey.algorithms.advice import advise
from covey.config import GRPOConfig
from covey.config.grpo_config import batch_arithmetic
from covey.data import PromptStream, check_dataset, num_embeddings
from covey.errors import ConfigError, RewardError
from covey.learner import Learner, Policy
from covey.learner.memory_estimate import enough_tokens, starting_rows, starting_tokens
from covey.learner.optimizer import make_optimizer, make_scheduler
from covey.learner.preparation import checkpoint_activations
from covey.learner.token_metrics import TokenEntropies
from covey.learner.update_guard import GuardPolicy, UpdateGuard
from covey.models import context_limit
from covey.monitor.slices import Slices
from covey.process.interruption import Interruption
from covey.process.world import World
from covey.rewards import Combiner, Scorer, resolve
from covey.rollout import GatheredSampler, Sampler, choose_sampler
from covey.runs import rollouts
from covey.training.agents import Agents
from covey.training.asynchrony import sampler_ahead
from covey.training.choosing import build_algorithm as build_algorithm
from covey.training.choosing import given_algorithm as given_algorithm
from covey.training.evaluator import Evaluator
from covey.training.invariants import OnPolicyCheck
from covey.training.languages import languages_of
from covey.training.live import attach
from covey.training.networks import Networks, networks_of, refuse_unsplit
from covey.training.parts import Parts
from covey.training.sampling import as_dict, sampler_options, sampling_params
from covey.training.session import Session, StopSignal
from covey.training.teaching import build_supervised, build_teacher


@dataclass(frozen=True, eq=False)
class RunInputs:
    """User inputs of a run, loaded and checked."""

    args: GRPOConfig
    model: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    algorithm: Algorithm
    scorer: Scorer
    train_dataset: Any
    world: World
    agents: Agents = field(default_factory=Agents)
    processor: Any = None
    """Processor of a vision-language model."""
    trainer: Any = None
    """Trainer, passed to a rollout function with its prompts."""
    frozen: Any = None
    """Copy of the model for the reference, made before; None: the reference makes its own."""
    server: Any = None
    """Connection to the vLLM server that writes completions."""
    before_update: Callable[[], None] = lambda: None
    after_update: Callable[[], None] = lambda: None
    """Callback after each optimizer step."""


def build_scorer(
    args: GRPOConfig,
    reward_funcs: Any,
    processing_classes: Any,
    trainer_state: Callable[[], Any],
    device: torch.device,
    num_own: int = 0,
    calculate: Any = None,
) -> Scorer:
    """One scorer over callables, reward models and names, with the limits of the configuration.

    The last `num_own` rewards are those of environments, not covered by `reward_weights`: their weight is 1.
    """
    if reward_funcs is None:
        raise RewardError(
            "reward_funcs is missing; give at least one function, reward model or name of a built-in reward."
        )
    many = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    tokenizers = (
        list(processing_classes) if isinstance(processing_classes, (list, tuple)) else [processing_classes] * len(many)
    )
    if len(tokenizers) != len(many):
        raise ConfigError(
            f"reward_processing_classes has {len(tokenizers)} entries for {len(many)} rewards; give one for each, None where "
            "a reward is a function."
        )
    rewards = [resolve(reward, tokenizer, device=device) for reward, tokenizer in zip(many, tokenizers, strict=True)]
    return Scorer(
        rewards,
        None if args.reward_weights is None else [*args.reward_weights, *[1.0] * num_own],
        combiner=Combiner(cast(Any, args.reward_normalization), cast(Any, args.reward_clip)),
        workers=args.reward_workers,
        timeout_seconds=args.reward_timeout_seconds,
        error_limit=args.reward_error_limit,
        on_error=args.on_reward_error,
        trainer_state=trainer_state,
        calculate=calculate,
    )


def advice_for(args: GRPOConfig, model: Any) -> list[str]:
    """Warnings about values far from published ones, each with its source. Loss options without effect are skipped."""
    acts = args.algorithm is None
    found = advise(
        learning_rate=args.learning_rate,
        num_generations=args.num_generations,
        temperature=args.temperature,
        num_iterations=args.num_iterations,
        is_lora=hasattr(model, "peft_config"),
        optimizer=str(getattr(args.optim, "value", args.optim)),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        beta=args.beta if acts else None,
        epsilon=args.epsilon if acts else None,
        epsilon_high=args.epsilon_high if acts else None,
        loss_type=args.loss_type if acts else None,
        entropy_coef=args.entropy_coef if acts else None,
        importance_sampling_level=args.importance_sampling_level,
        scale_rewards=args.scale_rewards,
    )
    return [str(one) for one in found]


def build_policy(given: RunInputs) -> Policy:
    args = given.args
    policy = Policy(
        model=given.model,
        pad_id=given.tokenizer.pad_token_id,
        temperature=args.temperature or 1.0,
        compute_dtype=compute_dtype(args),
        logits_chunk=args.logits_chunk_tokens,
        auxiliary_coefficient=auxiliary_coefficient(args, given.model),
        offloads=args.activation_offloading and given.world.device.type != "cpu",
        shared_attention=args.shared_attention,
        float32_head=args.cast_lm_head_to_fp32,
        packs_always=given.agents.has_single_completions,
    )
    if args.cast_lm_head_to_fp32:
        policy.expect_float32_head()
    if args.shared_attention != "auto":
        policy.shares_prompts()  # refuses an impossible request before any work
    return policy


def compute_dtype(args: GRPOConfig) -> torch.dtype | None:
    """Compute dtype of matmuls (autocast); None for the parameters' own."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else None


def auxiliary_coefficient(args: GRPOConfig, model: Any) -> float:
    """Weight of a mixture-of-experts model's load-balancing loss; 0 for other models."""
    config = model.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None)
    if own is None and args.router_aux_loss_coef:
        raise ConfigError(
            f"router_aux_loss_coef={args.router_aux_loss_coef}, but {type(model).__name__} has no router; leave it out."
        )
    chosen = own if args.router_aux_loss_coef is None else args.router_aux_loss_coef
    has_router = own is not None and getattr(config, "output_router_logits", None) is not None
    return float(chosen or 0.0) if has_router else 0.0


def build_prompts(
    given: RunInputs, dataset: Any, *, shuffle: bool, curriculum: str = "none", languages: Sequence[str] = ()
) -> PromptStream:
    args = given.args
    limit = context_limit(given.model)
    return PromptStream(
        dataset,
        given.tokenizer,
        processor=given.processor,
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=shuffle,
        curriculum=curriculum,
        chat_template_kwargs=given.agents.template_options(args),
        max_prompt_length=None if limit is None else limit - args.max_completion_length,
        on_too_long=cast(Literal["error", "drop"], args.on_long_prompt),
        num_embeddings=num_embeddings(given.model),
        languages=languages,
    )


def checkpoint_once(policy: Policy) -> bool:
    """Enable activation checkpointing; False if it is enabled already."""
    if policy.is_checkpointing:
        return False
    checkpoint_activations(policy.model)
    policy.model.train()  # blocks in eval mode ignore checkpointing
    return True


def build_guard_policy(args: GRPOConfig) -> GuardPolicy:
    """Update guard's options, from the options of the same names."""
    return GuardPolicy(**{item.name: getattr(args, item.name) for item in fields(GuardPolicy)})


def build_networks(given: RunInputs, optimizer: Any = None) -> Networks:
    """Policy, reference and critic, sharded over processes if the run is; `optimizer`: the user's own.

    Raises ConfigError for options that do not work with a sharded model.
    """
    args = given.args
    if args.sharding is not None and given.world.size > 1:
        refuse_unsplit(given.algorithm, given.model, optimizer, given.agents.rollout_func)
    policy = build_policy(given)
    on_cpu, shards = given.world.device.type == "cpu", 1 if args.sharding is None else given.world.size
    max_tokens = starting_tokens(args.max_tokens_per_microbatch, policy, on_cpu=on_cpu, shards=shards)
    return networks_of(given.algorithm, policy, given.world, args.sharding, max_tokens, given.frozen)


def build_learner(
    given: RunInputs,
    total_steps: int,
    optimizers: tuple[Any, Any],
    is_off_policy: bool,
    networks: Networks | None = None,
    **callbacks: Any,
) -> Learner:
    """The learner of `networks`, by default new ones. `callbacks`: `interruption` and `before_first_update` of `Learner`."""
    args, algorithm = given.args, given.algorithm
    on_cpu = given.world.device.type == "cpu"
    networks = build_networks(given, optimizers[0]) if networks is None else networks
    policy, critic = networks.policy, networks.critic
    extra: list[torch.nn.Module] = [critic] if isinstance(critic, torch.nn.Module) else []
    optimizer = optimizers[0] or make_optimizer(args, given.model, extra)
    scheduler = optimizers[1] or make_scheduler(args, optimizer, total_steps)
    sampling = sampling_params(args)
    template = given.agents.template_options(args)
    stop = callbacks.get("interruption", lambda: None)
    taught = partial(build_teacher, trust_remote_code=args.trust_remote_code, check_stop=stop)
    seed = args.seed if args.data_seed is None else args.data_seed
    batch = args.per_device_train_batch_size
    return Learner(
        policy=policy,
        reference=networks.reference,
        optimizer=optimizer,
        scheduler=scheduler,
        world=given.world,
        max_completion_length=args.max_completion_length,
        max_rows=starting_rows(
            args.max_tokens_per_microbatch, batch, batch * args.gradient_accumulation_steps, on_cpu=on_cpu
        ),
        max_tokens=networks.max_tokens,
        enough_tokens=enough_tokens(args.max_tokens_per_microbatch, on_cpu=on_cpu),
        max_grad_norm=args.max_grad_norm,
        guard=UpdateGuard(build_guard_policy(args)),
        mask_truncated=args.mask_truncated_completions,
        is_off_policy=is_off_policy,
        disable_dropout=args.disable_dropout,
        enable_recomputation=partial(checkpoint_once, policy) if args.checkpoint_when_needed else lambda: False,
        critic=critic,
        teacher=taught(algorithm, policy, given.tokenizer, template),
        supervised=build_supervised(algorithm, policy, given.tokenizer, given.eos_ids, template, seed),
        uses_sampler_logp=not (sampling.truncates or args.vllm_structured_outputs_regex)
        and sampling.repetition_penalty == 1.0,
        expects_stale=args.async_rollouts and args.max_staleness > 0,
        token_entropies=TokenEntropies(partial(rollouts.is_due, every=args.rollout_log_steps)),
        overlaps_reduction=policy.shards is None
        and not as_dict(args.gradient_checkpointing_kwargs).get("use_reentrant"),
        scaler=torch.amp.GradScaler(policy.device.type) if args.fp16 else None,
        before_update=given.before_update,
        after_update=given.after_update,
        **callbacks,
    )


def build_sampler(given: RunInputs, policy: Policy, check_stop: Interruption) -> Sampler:
    """Sampler of the run: in this process (with gathered weights if sharded), or asynchronous in worker processes."""
    args, shards = given.args, policy.shards
    if args.async_rollouts:
        return sampler_ahead(args, given.model, given.tokenizer, given.eos_ids, given.world, given.agents, check_stop)
    options = {"eos_ids": given.eos_ids, "check_stop": check_stop, **sampler_options(args, given.world, given.server)}
    if options.get("backend") == "vllm-server":
        options["check_wait"] = check_stop.while_waiting

    def make(**more: Any) -> Sampler:
        over = lambda model: choose_sampler(model, given.tokenizer, **options, **more)
        return over(given.model) if shards is None else GatheredSampler(shards, over)

    sampler = given.agents.sampler(make, args, given.tokenizer, given.eos_ids, given.trainer)
    if shards is not None:
        shards.free()  # the full weights, which only building the sampler needed
    return sampler


def build_parts(
    given: RunInputs,
    session: Callable[[Learner, int, float], Session],
    optimizers: tuple[Any, Any],
    num_prompts: int | None,
    stop: StopSignal,
) -> Parts:
    """Parts of the training loop. `session` creates the session from learner, number of steps and epoch length."""
    args = given.args
    if given.algorithm.needs.greedy and given.scorer.combiner.changes:
        raise ConfigError(
            "this algorithm compares with the reward of a greedy answer, which reward_normalization and reward_clip leave as it "
            "is; leave both out."
        )
    counts = batch_arithmetic(args, given.world.size, num_prompts)
    is_off_policy = counts.optimizer_steps_per_generation > 1
    world = given.world
    world.publish_stop(lambda: stop.requested)
    interruption = Interruption(lambda: world.hears_stop(stop.requested), world.any if world.size > 1 else None)
    networks = build_networks(given, optimizers[0])
    policy = networks.policy
    steps_per_epoch = counts.optimizer_steps_per_generation * (num_prompts or 0) / counts.prompts_per_generation
    sampler = build_sampler(given, policy, interruption)
    on_policy = OnPolicyCheck(policy, sampler.sampler if isinstance(sampler, GatheredSampler) else sampler)
    learner = build_learner(
        given,
        counts.total_steps,
        optimizers,
        is_off_policy,
        networks,
        interruption=interruption,
        before_first_update=on_policy,
    )
    attach(given, interruption)
    languages = languages_of(args, given.algorithm)
    order: dict[str, Any] = {"curriculum": args.curriculum, "languages": languages}
    made = session(learner, counts.total_steps, steps_per_epoch or float(counts.total_steps))
    return Parts(
        prompts=build_prompts(given, given.train_dataset, shuffle=args.shuffle_dataset, **order),
        sampler=sampler,
        scorer=given.scorer,
        learner=learner,
        algorithm=given.algorithm,
        session=made,
        world=given.world,
        interruption=interruption,
        sampling=sampling_params(args),
        prompts_per_rollout=counts.prompts_per_generation * max(1, len(languages)),
        num_generations=args.num_generations // max(1, len(languages)),
        dynamic_sampling=args.dynamic_sampling,
        batches_per_rollout=counts.optimizer_steps_per_generation // args.num_iterations,
        num_iterations=args.num_iterations,
        total_steps=counts.total_steps,
        seed=args.seed,
        max_staleness=args.max_staleness,
        pipeline_depth=args.pipeline_depth,
    )


def build_evaluator(given: RunInputs, parts: Parts) -> Evaluator:
    """Evaluator over the parts of training, with a fixed sampling seed."""
    args = given.args
    return Evaluator(
        sampler=parts.sampler,
        scorer=given.scorer,
        learner=parts.learner,
        algorithm=given.algorithm,
        world=given.world,
        sampling=sampling_params(args),
        num_generations=args.num_generations_eval or args.num_generations,
        batch_size=max(args.per_device_eval_batch_size, args.num_generations_eval or args.num_generations),
        seed=args.seed + 2**30,
        slices=Slices(args.metrics_by or ()),
    )


def checked_eval(given: Any, args: GRPOConfig) -> Any:
    """The evaluation set, or every set of a dict, checked for prompts."""
    if given is None:
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
            raise ConfigError(
                "eval_strategy asks for evaluations, but there is no eval_dataset; give one, or eval_strategy='no'."
            )
        return None
    if isinstance(given, Mapping):
        return {name: checked_dataset(dataset, f"eval_dataset[{name!r}]", args) for name, dataset in given.items()}
    return checked_dataset(given, "eval_dataset", args)


def checked_dataset(dataset: Any, name: str, args: GRPOConfig) -> Any:
    """The data set, checked for prompts, without the columns dropped by `remove_unused_columns`."""
    return check_dataset(dataset, name, prompt_only=bool(args.remove_unused_columns))
