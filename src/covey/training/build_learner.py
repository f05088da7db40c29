"""Construction of the networks and the learner of a run, from its options: a part of `build.py`."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from covey import algorithms as alg
from covey.adapters import has_adapter
from covey.algorithms import Algorithm
from covey.algorithms.reference import averages
from covey.config import GRPOConfig
from covey.config.combinations import expect_together
from covey.ensembles import Ensemble
from covey.environments.messages import with_messages
from covey.errors import ConfigError
from covey.learner import AdapterCopy, FrozenCopy, Learner, NoReference, Policy, ValueHead, ValueModel, no_critic
from covey.learner.context_parallel import expect_context, expect_media
from covey.learner.critic import Critic
from covey.learner.expert_choices import expect_replay
from covey.learner.memory_estimate import expect_host_room, offloaded_bytes, starting_limits, starting_tokens
from covey.learner.optimizer import LossScaler, expect_trained, make_optimizer, make_scheduler
from covey.learner.preparation import checkpoint_activations, on_accelerator
from covey.learner.reference import Reference
from covey.learner.token_metrics import TokenEntropies
from covey.learner.update_guard import GuardPolicy, UpdateGuard
from covey.models import config_of, decoder_of, reads_media, unwrapped
from covey.process.context import ContextGroup
from covey.process.sharding import Sharding, Shards, layer_classes
from covey.process.world import World
from covey.rewards import Scorer
from covey.runs import rollouts
from covey.training.agents import Agents
from covey.training.build_algorithm import build_algorithm as build_algorithm
from covey.training.build_algorithm import choose_algorithm as choose_algorithm
from covey.training.build_sampler import as_dict, draws_otherwise, sampling_params
from covey.training.teaching import build_supervised, build_teacher, past_rule, sizes_of_teachers
from covey.types import Prompt

Shard = Callable[..., Shards]
"""Function that splits a module over the processes; `keeps_whole`: as of `Shards`."""


@dataclass(frozen=True, eq=False)
class Networks:
    """The models of a run's learner."""

    policy: Policy
    reference: Reference
    critic: Critic
    max_tokens: int | None
    """Initial token limit of a micro-batch, measured before sharding."""
    past: FrozenCopy | None = None
    """Copy of the policy for a teacher that is its past, made before sharding. None: the teacher makes its own, or needs none."""
    shard: Shard | None = None
    """Splits another model over the processes in the same way. None: every process holds models whole."""


def networks_of(
    algorithm: Algorithm,
    policy: Policy,
    world: World,
    sharding: Sharding | None,
    max_tokens: int | None,
    frozen: Any = None,
    *,
    keeps_whole: bool = True,
) -> Networks:
    """Policy, reference and critic of an algorithm. `frozen`: a copy of the model for the reference, made before.

    `keeps_whole`: a sharded policy can be gathered whole, for a sampler in this process.
    Copies are made before the policy is sharded, after which it cannot be copied. Raises ConfigError if it cannot be sharded.
    """
    if sharding is None or world.size == 1:
        whole = build_reference(algorithm, policy, frozen=frozen)
        return Networks(policy, whole, build_critic(algorithm, policy), max_tokens)
    devices = set(getattr(policy.model, "hf_device_map", {}).values())
    is_quantized = getattr(policy.model, "is_quantized", False)  # which sets one device
    expect_together("FSDP2", (len(devices) > 1 or (bool(devices) and not is_quantized)) and "device_map")

    def shard(module: nn.Module, keeps_whole: bool = False) -> Shards:
        blocks = text_layers(module) if sharding.blocks is None and reads_media(module) else sharding.blocks
        return Shards(module, world, replace(sharding, blocks=blocks), keeps_whole=keeps_whole)

    critic = build_critic(algorithm, policy, shard)
    reference = None if has_adapter(policy.model) else build_reference(algorithm, policy, shard)
    past = None
    if not has_adapter(policy.model) and (rule := past_rule(algorithm)) is not None:
        past = FrozenCopy.of(policy, follows=rule is not alg.keep, shard=shard)
    policy = policy.sharded(partial(shard, keeps_whole=keeps_whole))
    return Networks(policy, reference or build_reference(algorithm, policy), critic, max_tokens, past, shard)


def text_layers(model: nn.Module) -> tuple[str, ...]:
    """Classes of the layers of the language model inside one that reads media.

    The rest, which a pass of text does not run, is gathered with the root in every pass.
    """
    inside = {type(part).__name__ for part in decoder_of(model).modules()}
    return tuple(sorted(inside & set(layer_classes(model))))


def refuse_unsplit(optimizer: Any, rollout_func: Any) -> None:
    """Raise ConfigError for what would hold the unsharded parameters of a sharded model, or measures it before each step."""
    expect_together("FSDP2", optimizer is not None and "optimizer object")
    expect_together("FSDP2", rollout_func is not None and "rollout_func")


def build_reference(algorithm: Algorithm, policy: Policy, shard: Shard | None = None, frozen: Any = None) -> Reference:
    """Reference of the KL term: none, a copy of the adapter, or a copy of the model, by default a new one."""
    if not algorithm.needs.reference:
        return NoReference()
    if has_adapter(policy.model):
        return AdapterCopy.of(policy)
    return FrozenCopy.of(policy, follows=algorithm.reference is not alg.keep, shard=shard, model=frozen)


def build_critic(algorithm: Algorithm, policy: Policy, shard: Shard | None = None) -> Critic:
    """Critic of the algorithm: none, a value head on the policy's hidden states, or a separate value model."""
    if algorithm.critic is None:
        return no_critic()
    if algorithm.has_separate_critic:
        return ValueModel.of(policy, shard)
    hidden: Any = unwrapped(policy.model).config.get_text_config().hidden_size
    return ValueHead(hidden, policy.device)


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
    ensemble: Ensemble | None = None
    """Models whose completions join the groups of training. None: the policy alone."""
    processor: Any = None
    """Processor of a model that reads media."""
    trainer: Any = None
    """Trainer, passed to a rollout function with its prompts."""
    frozen: Any = None
    """Copy of the model for the reference, made before; None: the reference makes its own."""
    server: Any = None
    """Connection to the vLLM server that writes completions."""
    before_update: Callable[[], None] = lambda: None
    after_update: Callable[[], None] = lambda: None
    """Callback after each optimizer step."""

    def __post_init__(self) -> None:
        if self.scorer is not None:  # `covey why` calls no reward
            self.scorer.read = partial(with_messages, tokenizer=self.tokenizer)


def learner_world(inputs: RunInputs) -> World:
    """The run's processes as the learner shares out completions over them: those of one context compute each together."""
    return replace(inputs.world, context=inputs.args.context if inputs.world.size > 1 else 1)


def build_policy(inputs: RunInputs) -> Policy:
    args, shared_out = inputs.args, learner_world(inputs)
    policy = Policy(
        model=inputs.model,
        pad_id=inputs.tokenizer.pad_token_id,
        temperature=sampling_params(args).temperature or 1.0,
        compute_dtype=compute_dtype(args),
        logits_chunk=args.logits_chunk_tokens,
        auxiliary_coefficient=auxiliary_coefficient(args, inputs.model),
        offloads=args.activation_offloading and inputs.world.device.type != "cpu",
        shared_attention=args.shared_attention,
        float32_head=args.cast_lm_head_to_fp32,
        packs_always=inputs.agents.has_single_completions or shared_out.context > 1,
        context=ContextGroup(shared_out) if shared_out.context > 1 else None,
        replays_experts=args.router_replay is not None,
    )
    if args.router_replay:
        features = inputs.agents.features
        expect_together("router_replay", *features, writer=features[0] if features else "")
        expect_replay(policy)
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


def _routes(model: nn.Module) -> bool:
    """True if a layer of the model chooses between experts; a model of a family of experts may have none."""
    recorded = getattr(unwrapped(model), "_can_record_outputs", None) or {}
    routers = recorded.get("router_logits") or ()
    listed = routers if isinstance(routers, list | tuple) else [routers]
    classes = [getattr(router, "target_class", router) for router in listed]
    kinds = [kind for kind in classes if isinstance(kind, type)]
    if not kinds:  # transformers 5.17 lists none of some families
        return any("expert" in name or "router" in name for name, _ in model.named_modules())
    return any(isinstance(module, tuple(kinds)) for module in model.modules())


def _balances(model: nn.Module) -> bool:
    """True if the model's forward computes a load-balancing loss; Llama 4's does not, with a coefficient in its configuration."""
    kinds = type(unwrapped(getattr(model, "_orig_mod", model))).__mro__  # torch.compile's wrapper has that name
    forwards = [inspect.unwrap(vars(kind)["forward"]) for kind in kinds if "forward" in vars(kind)]
    return any("aux_loss" in forward.__code__.co_varnames for forward in forwards if inspect.isfunction(forward))


def auxiliary_coefficient(args: GRPOConfig, model: Any) -> float:
    """Weight of a mixture-of-experts model's load-balancing loss; 0 for other models."""
    config = model.config.get_text_config()
    declared = getattr(config, "router_aux_loss_coef", None)
    is_declared = declared is not None and getattr(config, "output_router_logits", None) is not None
    has_router = is_declared and _routes(model) and _balances(model)
    if args.router_aux_loss_coef and not has_router:
        raise ConfigError(
            f"router_aux_loss_coef={args.router_aux_loss_coef}, but {type(unwrapped(model)).__name__} computes no load-balancing loss; "
            "leave it out."
        )
    chosen = (declared if args.router_aux_loss_coef is None else args.router_aux_loss_coef) if has_router else 0.0
    if chosen and args.checkpoints_activations and as_dict(args.gradient_checkpointing_kwargs).get("use_reentrant"):
        raise ConfigError(
            "gradient_checkpointing_kwargs={'use_reentrant': True} would take the gradient from the load-balancing loss of the model's "
            "experts, whose routers run without one there; leave it out, or set router_aux_loss_coef=0."
        )
    return float(chosen or 0.0)


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


def build_networks(inputs: RunInputs, optimizer: Any = None, example: Prompt | None = None) -> Networks:
    """Policy, reference and critic, sharded over processes if the run is; `optimizer`: the user's own.

    `example`: a prompt with media, which the policy's processes must be able to compute together.
    Raises ConfigError for options that do not work with a sharded model.
    """
    args = inputs.args
    if args.sharding is not None and inputs.world.size > 1:
        refuse_unsplit(optimizer, inputs.agents.rollout_func)
    policy = on_accelerator(build_policy(inputs), is_split=args.sharding is not None and inputs.world.size > 1)
    if example is not None:
        expect_together("separate critic", inputs.algorithm.has_separate_critic and "media")
        expect_media(policy, example)
    if args.sharding is not None and args.sharding.offloads and inputs.world.size > 1:
        rules = [inputs.algorithm.reference] if inputs.algorithm.needs.reference else []
        rules += [rule for rule in [past_rule(inputs.algorithm)] if rule is not None]
        rules = [] if has_adapter(inputs.model) else rules
        needed = offloaded_bytes(
            policy,
            str(getattr(args.optim, "value", args.optim)),
            copies=len(rules),
            averages=sum(map(averages, rules)),
            has_critic=inputs.algorithm.has_separate_critic,
            teachers=bytes_of_teachers(inputs),
        )
        held = sum(p.nbytes for p in inputs.model.parameters()) if inputs.world.device.type == "cpu" else 0
        expect_host_room(needed, inputs.world, held)
    on_cpu = inputs.world.device.type == "cpu"
    shards = 1 if args.sharding is None else math.inf if args.sharding.offloads else inputs.world.size
    max_tokens = starting_tokens(
        args.max_tokens_per_microbatch, policy, on_cpu=on_cpu, shards=shards, context=learner_world(inputs).context
    )
    keeps_whole = args.rollout_backend != "vllm" or (args.async_rollouts and args.vllm_mode != "server")
    networks = networks_of(
        inputs.algorithm, policy, inputs.world, args.sharding, max_tokens, inputs.frozen, keeps_whole=keeps_whole
    )
    expect_context(networks.policy)
    return networks


def bytes_of_teachers(inputs: RunInputs) -> int:
    """Bytes of the weights of teachers that this run loads, about."""
    read = lambda source: config_of(source, trust_remote_code=inputs.args.trust_remote_code)
    policy = unwrapped(inputs.model).config
    return sum(size for _, size in sizes_of_teachers(inputs.algorithm.role, policy, read))


def samples_here(inputs: RunInputs) -> bool:
    """True if the run's completions are drawn by Covey with the weights that it trains.

    So they are by workers without staleness, whose run is the one without `async_rollouts` bit for bit.
    """
    args, agents = inputs.args, inputs.agents
    is_elsewhere = args.rollout_backend == "vllm" or (args.async_rollouts and args.max_staleness > 0)
    return not is_elsewhere and agents.rollout_func is None and agents.agent is None


def build_learner(
    inputs: RunInputs,
    total_steps: int,
    optimizers: tuple[Any, Any],
    is_off_policy: bool,
    networks: Networks | None = None,
    **callbacks: Any,
) -> Learner:
    """The learner of `networks`, by default new ones.

    `callbacks`: `interruption`, `before_first_update` and `samples_here` of `Learner`.
    """
    args, algorithm = inputs.args, inputs.algorithm
    networks = build_networks(inputs, optimizers[0]) if networks is None else networks
    policy, critic = networks.policy, networks.critic
    extra: list[torch.nn.Module] = [critic] if isinstance(critic, torch.nn.Module) else []
    optimizer = optimizers[0] or make_optimizer(args, inputs.model, extra)
    scheduler = optimizers[1] or make_scheduler(args, optimizer, total_steps)
    if any(optimizers):
        expect_trained(optimizer, scheduler, inputs.model, extra)
    template = inputs.agents.template_options(args.chat_template_kwargs)
    stop = callbacks["interruption"].when_apart if "interruption" in callbacks else lambda: None
    teach = partial(build_teacher, eos_ids=inputs.eos_ids, trust_remote_code=args.trust_remote_code, check_stop=stop)
    copies: dict[str, Any] = {"reference": networks.reference, "past": networks.past, "shard": networks.shard}
    seed = args.seed if args.data_seed is None else args.data_seed
    batch = args.per_device_train_batch_size
    return Learner(
        policy=policy,
        reference=networks.reference,
        optimizer=optimizer,
        scheduler=scheduler,
        world=learner_world(inputs),
        max_completion_length=args.max_completion_length,
        limits=starting_limits(
            args.max_tokens_per_microbatch,
            batch,
            batch * args.gradient_accumulation_steps,
            on_cpu=inputs.world.device.type == "cpu",
            max_tokens=networks.max_tokens,
            enable_recomputation=partial(checkpoint_once, policy) if args.checkpoint_when_needed else lambda: False,
            device=policy.device.type,
        ),
        max_grad_norm=args.max_grad_norm,
        guard=UpdateGuard(build_guard_policy(args)),
        mask_truncated=args.mask_truncated_completions,
        is_off_policy=is_off_policy,
        disable_dropout=args.disable_dropout,
        critic=critic,
        teacher=teach(algorithm, policy, inputs.tokenizer, template, **copies),
        supervised=build_supervised(algorithm, policy, inputs.tokenizer, inputs.eos_ids, template, seed),
        uses_sampler_logp=not draws_otherwise(args),
        expects_stale=args.async_rollouts and args.max_staleness > 0,
        token_entropies=TokenEntropies(partial(rollouts.is_due, every=args.rollout_log_steps)),
        overlaps_reduction=policy.shards is None
        and not as_dict(args.gradient_checkpointing_kwargs).get("use_reentrant"),
        scaler=LossScaler(policy.device.type) if args.fp16 else None,
        before_update=inputs.before_update,
        after_update=inputs.after_update,
        **callbacks,
    )
