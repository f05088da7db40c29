"""Construction of the parts of a run: with `build_learner.py` the only reader of the whole configuration."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch

from covey.algorithms import Algorithm
from covey.algorithms.advice import advise
from covey.algorithms.greedy import GreedyBaseline
from covey.config import GRPOConfig
from covey.config.batches import batch_arithmetic
from covey.config.combinations import expect_together, features_of
from covey.data import PromptStream, num_embeddings
from covey.data.media import MEDIA_COLUMNS
from covey.ensembles import Ensemble
from covey.ensembles.stages import checked_ensemble, ensemble_stages, load_ensemble
from covey.environments.branches import episode_stages
from covey.environments.messages import with_thoughts_apart
from covey.errors import ConfigError, RewardError
from covey.learner import Learner, Policy
from covey.models import context_limit
from covey.monitor.slices import Slices
from covey.process.interruption import Interruption
from covey.process.sharding import Shards
from covey.rewards import Combiner, Scorer, resolve
from covey.rewards.combining import advice_on_weights
from covey.rollout import GatheredSampler, Sampler, TokenSampler, choose_sampler
from covey.rollout.ahead import Ahead, OnDemand, PromptSupply
from covey.rollout.asynchronous import AsynchronousSampler
from covey.runs import StopRequest
from covey.training.agents import Agents
from covey.training.build_algorithm import languages_of
from covey.training.build_learner import RunInputs, Shard, build_learner, build_networks, learner_world, samples_here
from covey.training.build_sampler import (
    agent_options,
    computing_options,
    engine_length,
    name_idle_options,
    sampler_ahead,
    sampler_options,
    sampling_params,
    thinking_options,
    thinking_stages,
)
from covey.training.datasets import attach
from covey.training.drawing import Draws, RolloutSampling
from covey.training.evaluator import Evaluator, average_of
from covey.training.invariants import OnPolicyCheck, expect_served_policy
from covey.training.parts import Parts
from covey.training.session import Session
from covey.types import Prompt, Stages

logger = logging.getLogger(__name__)


def build_scorer(
    args: GRPOConfig,
    reward_funcs: Any,
    processing_classes: Any,
    trainer_state: Callable[[], Any],
    device: torch.device,
    num_unweighted: int = 0,
    calculate: Any = None,
) -> Scorer:
    """One scorer over callables, reward models and names, with the limits of the configuration.

    The last `num_unweighted` rewards are those of environments, not covered by `reward_weights`: their weight is 1.
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
        None if args.reward_weights is None else [*args.reward_weights, *[1.0] * num_unweighted],
        combiner=Combiner(cast(Any, args.reward_normalization), cast(Any, args.reward_clip)),
        workers=args.reward_workers,
        timeout_seconds=args.reward_timeout_seconds,
        error_limit=args.reward_error_limit,
        on_error=args.on_reward_error,
        trainer_state=trainer_state,
        calculate=calculate,
    )


def advice_for(args: GRPOConfig, model: torch.nn.Module, algorithm: Algorithm | None) -> list[str]:
    """Warnings about values far from published ones, each with its source. Loss options without effect are skipped."""
    acts = args.algorithm is None
    ignores_rewards = getattr(getattr(algorithm, "objective", None), "ignores_rewards", False)
    role = algorithm.role if algorithm is not None and ignores_rewards else None
    remarks = advise(
        learning_rate=args.learning_rate,
        num_generations=None if ignores_rewards else args.num_generations,
        temperature=sampling_params(args).temperature,
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
        teaches_itself=role is not None and role.is_policy and role.feedback == "best",
    )
    return [*map(str, remarks), *advice_on_weights(args.reward_weights, args.metric_for_best_model)]


def build_prompts(inputs: RunInputs, dataset: Any, **options: Any) -> PromptStream:
    """The stream of a data set's prompts. `options`: PromptStream's, such as `shuffle`."""
    args, limit = inputs.args, context_limit(inputs.model)
    return PromptStream(
        dataset,
        inputs.tokenizer,
        processor=inputs.processor,
        seed=args.seed if args.data_seed is None else args.data_seed,
        chat_template_kwargs=inputs.agents.template_options(args.chat_template_kwargs),
        max_prompt_length=None if limit is None else limit - args.max_completion_length,
        on_too_long=cast(Literal["error", "drop"], args.on_long_prompt),
        num_embeddings=num_embeddings(inputs.model),
        **{"engine": engine_length(args, inputs.server, limit), **options},
    )


def media_example(inputs: RunInputs) -> Prompt | None:
    """A prompt of the data set with images or sounds, for a comparison with vLLM, processes that share out rows and a separate critic; else None."""
    is_shared = inputs.args.rollout_backend == "vllm" or learner_world(inputs).context > 1
    if not (is_shared or inputs.algorithm.has_separate_critic) or inputs.processor is None:
        return None
    example = build_prompts(inputs, inputs.train_dataset, shuffle=False, engine=None).first_with_media()
    columns = [name for name in getattr(inputs.train_dataset, "column_names", None) or () if name in MEDIA_COLUMNS]
    if example is None and columns and inputs.args.sharding is not None and learner_world(inputs).context > 1:
        logger.warning(
            "train_dataset has the column %s, and its first rows have nothing there to try before fsdp splits the model: with cp_size, a "
            "later row with media ends the run. Put such a row first.",
            columns[0],
        )
    return example


def build_sampler(
    inputs: RunInputs, policy: Policy, check_stop: Interruption, example: Prompt | None = None
) -> Sampler:
    """Sampler of the run: in this process (with gathered weights if sharded), or asynchronous in worker processes.

    `example`: a prompt with media, by which a vLLM server is compared with the learner.
    """
    args, shards = inputs.args, policy.shards
    name_idle_options(inputs.agents, args, has_members=inputs.ensemble is not None, dataset=inputs.train_dataset)
    is_replaced = inputs.scorer.replaced is not None
    expect_together(*features_of(args), *inputs.agents.features, is_replaced and "_calculate_rewards")
    if args.async_rollouts:
        ahead = sampler_ahead(
            args,
            inputs.model,
            inputs.tokenizer,
            inputs.eos_ids,
            inputs.world,
            inputs.agents,
            check_stop,
            shards,
            inputs.server,
            example,
            inputs.processor,
        )
        if shards is not None:
            shards.free()
        return ahead
    options = sampler_options(args, inputs.world, inputs.server, example)
    expect_together(*inputs.agents.features, options.get("backend") == "generate" and "generate")
    return _sampler_here(inputs, policy, check_stop, options)


def build_evaluation_sampler(inputs: RunInputs, policy: Policy, check_stop: Interruption) -> Sampler | None:
    """Sampler in this process for evaluations of averaged weights, where others write the rollouts ahead. None: that of the run serves.

    Averaged weights that were sent to the workers would write into the rollouts that are ahead.
    """
    args = inputs.args
    if not args.async_rollouts or average_of(args, inputs.model) is None:
        return None
    options = sampler_options(args, inputs.world, inputs.server, is_second=True)
    if options.get("backend") == "vllm-server":
        options = {"backend": "auto", **computing_options(args, inputs.world)}
    return _sampler_here(inputs, policy, check_stop, options)


def _sampler_here(inputs: RunInputs, policy: Policy, check_stop: Interruption, options: Mapping[str, Any]) -> Sampler:
    shards = policy.shards
    options = {"eos_ids": inputs.eos_ids, "check_stop": check_stop, **options}
    gathers = options.get("backend") in ("vllm-server", "vllm")  # by itself, a block at a time
    options |= {"shards": shards} if gathers else {}
    options |= {"processor": inputs.processor} if options.get("backend") == "vllm" else {}
    waits = {"check_wait": check_stop.while_waiting, "agree": check_stop.agrees}
    options |= waits if options.get("backend") == "vllm-server" else {}

    over = lambda model, **more: choose_sampler(model, inputs.tokenizer, **options, **more)
    more = agent_options(inputs.args, inputs.world.rank, inputs.processor)
    drives = lambda make: inputs.agents.sampler(make, more, inputs.tokenizer, inputs.eos_ids, inputs.trainer)
    with nullcontext() if gathers else check_stop.armed():  # a trial hears a stop; a server is not left half started
        sampler = inputs.agents.driven(drives, over, inputs.model, None if gathers else shards)
    if shards is not None:
        shards.free()  # the full weights, which only building the sampler needed
    return sampler


def build_parts(
    inputs: RunInputs,
    session: Callable[[Learner, int, float], Session],
    optimizers: tuple[Any, Any],
    num_prompts: int | None,
    stop: StopRequest,
) -> Parts:
    """Parts of the training loop. `session` creates the session from learner, number of steps and epoch length: last, as it begins
    the run's folder, which what is refused before leaves as it is.
    """
    args = inputs.args
    refuse_scaled_greedy(inputs.algorithm, inputs.scorer)
    counts = batch_arithmetic(args, inputs.world.size, num_prompts)
    world, updates = inputs.world, counts.optimizer_steps_per_generation
    world.publish_stop(lambda: stop.requested)
    interruption = Interruption(lambda: world.hears_stop(stop.requested), world.any if world.size > 1 else None)
    example = media_example(inputs)
    networks = build_networks(inputs, optimizers[0], example)
    steps_per_epoch = updates * (num_prompts or 0) / counts.prompts_per_generation
    sampler = build_sampler(inputs, networks.policy, interruption, example)
    on_policy = OnPolicyCheck(networks.policy, sampler.sampler if isinstance(sampler, GatheredSampler) else sampler)
    callbacks = {"interruption": interruption, "before_first_update": on_policy, "samples_here": samples_here(inputs)}
    learner = build_learner(inputs, counts.total_steps, optimizers, updates > 1, networks, **callbacks)
    attach(inputs, interruption)
    languages = languages_of(args, inputs.algorithm)
    sizes: dict[str, Any] = {
        "prompts_per_rollout": counts.prompts_per_generation * max(1, len(languages)),
        "num_generations": args.num_generations // max(1, len(languages)),
        "total_steps": counts.total_steps,
    }
    prompts = build_prompts(
        inputs, inputs.train_dataset, shuffle=args.shuffle_dataset, curriculum=args.curriculum, languages=languages
    )
    sampling = RolloutSampling(sampling_params(args), args.seed)
    supply = build_supply(args, prompts, sampler, sampling, updates, interruption, **sizes)
    draws = Draws(sampler=sampler, scorer=inputs.scorer, world=world, interruption=interruption)
    draws, stages = build_stages(inputs, draws, learner, sampling, networks.shard)
    return Parts(
        prompts=prompts,
        supply=supply,
        sampler=sampler,
        evaluation_sampler=build_evaluation_sampler(inputs, networks.policy, interruption),
        check_sampler=partial(expect_served_policy, sampler, inputs.model, example),
        draws=draws,
        stages=stages + supply.stages,
        scorer=inputs.scorer,
        learner=learner,
        algorithm=inputs.algorithm,
        session=session(learner, counts.total_steps, steps_per_epoch or float(counts.total_steps)),
        world=inputs.world,
        interruption=interruption,
        sampling_for=sampling,
        dynamic_sampling=args.dynamic_sampling,
        batches_per_rollout=updates // args.num_iterations,
        num_iterations=args.num_iterations,
        seed=args.seed,
        average=None if inputs.train_dataset is None else average_of(args, inputs.model),
        **sizes,
    )


def refuse_scaled_greedy(algorithm: Algorithm, scorer: Scorer) -> None:
    """Raise ConfigError for rewards that are scaled while the greedy answer's, the baseline, are not."""
    if algorithm.needs.greedy and scorer.combiner.changes:
        raise ConfigError(
            "this algorithm compares with the reward of a greedy answer, which reward_normalization and reward_clip leave as it "
            "is; leave both out."
        )


def build_supply(
    args: GRPOConfig,
    prompts: PromptStream,
    sampler: Sampler,
    sampling: RolloutSampling,
    updates_per_rollout: int,
    interruption: Interruption,
    **sizes: int,
) -> PromptSupply:
    """Prompts on demand, or of rollouts that workers were given ahead. `sizes`: those of `Ahead`."""
    if not isinstance(sampler, AsynchronousSampler):
        return OnDemand(prompts)
    return Ahead(
        prompts=prompts,
        sampler=sampler,
        updates_per_rollout=updates_per_rollout,
        max_staleness=args.max_staleness,
        depth=args.pipeline_depth,
        sampling_for=sampling,
        is_stopping=interruption.is_requested,
        **sizes,
    )


def ensemble_of(ensemble: Any, agents: Agents, args: GRPOConfig) -> Ensemble | None:
    """The ensemble of a trainer's argument. Raises ConfigError for features of the run that do not go together."""
    features = [*features_of(args), *agents.features]
    expect_together(*features)
    return checked_ensemble(ensemble, args.num_generations, features)


def build_stages(
    inputs: RunInputs, draws: Draws, learner: Learner, sampling: RolloutSampling, shard: Shard | None = None
) -> tuple[Draws, Stages]:
    """The stages of the run's features, and the draws with the members of its ensemble, split by `shard`."""
    args, stages = inputs.args, thinking_stages(inputs.args)
    if inputs.agents.are_used:
        stages += episode_stages()
    if inputs.algorithm.needs.greedy:
        stages += Stages(before_advantages=(GreedyBaseline(partial(draws.greedy, sampling=sampling.params)),))
    if inputs.ensemble is None:
        return draws, stages
    members = load_ensemble(
        inputs.ensemble,
        draws.sampler,
        inputs.model,
        inputs.tokenizer,
        inputs.eos_ids,
        inputs.world.device,
        inputs.agents.template_options(args.chat_template_kwargs),
        trust_remote_code=args.trust_remote_code,
        check_stop=draws.interruption,
        shard=None if shard is None else partial(shard, keeps_whole=True),
        episodes=partial(_member_episodes, inputs) if inputs.agents.are_used else None,
        read_turn=with_thoughts_apart,
        **thinking_options(args),
    )
    stages += ensemble_stages(members, inputs.scorer, learner, inputs.world, sampling, draws.score)
    return replace(draws, sampler=members), stages


def _member_episodes(
    inputs: RunInputs,
    over: Callable[..., TokenSampler],
    model: torch.nn.Module,
    shards: Shards | None,
    tokenizer: Any,
    eos_ids: Sequence[int],
) -> Sampler:
    """The sampler of an ensemble's member, which calls the run's tools, acts in its environment, or answers its agent."""
    agents, options = inputs.agents.of_member(), agent_options(inputs.args, inputs.world.rank, inputs.processor)
    options = replace(options, may_fail=True, record=lambda version, traces: None)  # traces are the policy's
    return agents.driven(lambda make: agents.sampler(make, options, tokenizer, eos_ids, None), over, model, shards)


def build_evaluator(inputs: RunInputs, parts: Parts) -> Evaluator:
    """Evaluator over the parts of training, with a fixed sampling seed."""
    args = inputs.args
    return Evaluator(
        # without the members of an ensemble
        draws=replace(parts.draws, sampler=parts.evaluation_sampler or parts.sampler),
        scorer=inputs.scorer,
        learner=parts.learner,
        algorithm=inputs.algorithm,
        world=inputs.world,
        sampling=sampling_params(args),
        num_generations=args.num_generations_eval or args.num_generations,
        batch_size=max(args.per_device_eval_batch_size, args.num_generations_eval or args.num_generations),
        seed=args.seed + 2**30,
        slices=Slices(args.metrics_by or ()),
    )
