"""Combinations that fit a cluster: what is trained, how it is split and who writes, by the seconds of a step."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from covey.config.combinations import refusal_of
from covey.doctor.dry_run import Measured
from covey.doctor.roofline.estimate import Estimate, Setup, estimate
from covey.doctor.roofline.gpus import A_NODE, GPUS
from covey.errors import ConfigError
from covey.learner.memory_estimate import in_gib
from covey.training.build_sampler import as_dict

PACKED = 0.5625
"""Bytes of a weight in 4 bits, with a scale in float32 for each 64 of them (bitsandbytes' NF4)."""
LONG = 32_768
"""Tokens of a prompt with its completion from which rows are shared out over GPUs too, also where they fit on one."""
_CONTEXTS = (2, 4, 8)
_SHARE = 0.6
"""Most of a GPU's memory that the weights of a vLLM engine take before it is split over twice the GPUs."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to hold and train the weights, measured."""

    features: tuple[str, ...]
    setup: Setup
    measurement: Measured
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A combination and its plan."""

    features: tuple[str, ...]
    """Names of `covey.config.combinations`, and more words for what has none."""
    plan: Estimate
    options: Mapping[str, Any]
    """Options of `covey train`."""

    @property
    def name(self) -> str:
        writers = self.plan.setup.writers
        return ", ".join(self.features) + (f" ({writers} of {self.plan.gpus} GPUs write)" if writers else "")

    @property
    def memory(self) -> int:
        """Bytes on the fullest GPU."""
        return max(self.plan.held.peak, self.plan.writer)


def ways(setup: Setup, lora: Any) -> list[Way]:
    """All weights, LoRA and QLoRA, whole or split; `lora`: PEFT's configuration, None without PEFT. A run with an adapter has no full way."""
    made = []
    trained = {"LoRA": setup.adapter or lora} if setup.adapter or lora else {}
    for name, adapter in {**({} if setup.adapter else {"all weights": None}), **trained}.items():
        base = setup if adapter is None else replace(in_bfloat16(setup), adapter=adapter)
        options = {} if adapter is None else {"lora_r": adapter.r, "dtype": "bfloat16"}
        for is_split in (False, True) if setup.gpus > 1 else (False,):
            held = replace(base, is_split=is_split)
            how = ("FSDP2",) if is_split else ("DDP",) if setup.gpus > 1 else ()
            split = {"fsdp": True} if is_split else {}
            measurement = held.measure()
            made.append(Way(features=(name, *how), setup=held, measurement=measurement, options={**options, **split}))
            if adapter is not None:
                loaded = {"dtype": "bfloat16", "quantization_config": {"load_in_4bit": True}}
                packed = {"lora_r": adapter.r, "model_init_kwargs": loaded, **split}
                made.append(
                    Way(features=("QLoRA", *how), setup=held, measurement=_packed(held, measurement), options=packed)
                )
    return made


def choices(setup: Setup, made: list[Way]) -> list[Choice]:
    """The plan of every combination on the cluster of `setup`, whose completions a step stay; fastest first, those that fit before others."""
    return sorted((choice for way in made for choice in _of_way(setup, way)), key=_rank)


def _rank(choice: Choice) -> tuple[bool, float]:
    """Order of plans: those that fit by their seconds, then the others by their memory."""
    fits = choice.plan.fits
    return not fits, choice.plan.seconds.step if fits else choice.memory


def nearest(setup: Setup, made: list[Way], plans: list[Choice]) -> str:
    """The sentence for a cluster on which nothing fits: the combination that is nearest, and GPUs on which one fits."""
    first, gpu = min(plans, key=lambda choice: choice.memory), setup.gpu
    sentence = f"no combination fits {setup.gpus} x {gpu.name}: the nearest, {first.name}, takes {_shortage(first)}"
    larger = sorted((other for other in GPUS.values() if other.memory > gpu.memory), key=lambda other: other.memory)
    others = [(setup.gpus * 2**power, gpu) for power in range(1, 6)] + [(setup.gpus, other) for other in larger]
    for count, other in others:
        here = replace(setup, gpus=count, gpu=other)
        moved = [replace(way, setup=replace(way.setup, gpus=count, gpu=other)) for way in made]
        split = [_also_split(way) for way in moved if count > 1 and setup.gpus == 1]
        as_many = with_learners(here, count, completions_of(setup)) or here  # completions a step
        fitting = next((choice for choice in choices(as_many, [*moved, *split]) if choice.plan.fits), None)
        if fitting is not None:
            return f"{sentence}; {fitting.name} would fit {count} x {other.name}."
    return f"{sentence}; shorten --max-completion-length, or choose a smaller model."


def _shortage(choice: Choice) -> str:
    """Memory that is too little for a choice: of a GPU, or else of a node."""
    plan, setup = choice.plan, choice.plan.setup
    if choice.memory > setup.gpu.memory or plan.fits_hosts:
        return f"{in_gib(choice.memory)} of {in_gib(setup.gpu.memory)} on a GPU"
    return f"{in_gib(plan.host)} of {in_gib(setup.host_memory or 0)} in the host memory of a node"


def in_bfloat16(setup: Setup) -> Setup:
    """The same with the weights loaded in bfloat16, where the GPU has it."""
    args = copy.copy(setup.args)
    if args.bf16:
        args.model_init_kwargs = {**as_dict(args.model_init_kwargs), "dtype": "bfloat16"}
    return replace(setup, args=args)


def with_learners(setup: Setup, learners: int, completions: int) -> Setup | None:
    """The same step of so many completions on this number of learners; None where they do not divide."""
    rows, args = completions // learners, copy.copy(setup.args)
    if completions % learners:
        return None
    generations = max(1, (args.steps_per_generation or 1) // args.gradient_accumulation_steps)
    batch = next(n for n in range(min(rows, args.per_device_train_batch_size), 0, -1) if rows % n == 0)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = batch, rows // batch
    args.steps_per_generation = generations * args.gradient_accumulation_steps
    return replace(setup, args=args, gpus=learners)


def completions_of(setup: Setup) -> int:
    """Completions of a step where every GPU learns."""
    return int(setup.args.per_device_train_batch_size * setup.args.gradient_accumulation_steps * setup.gpus)


def _also_split(way: Way) -> Way:
    """The way of one GPU, split over the GPUs of its setup."""
    return replace(
        way,
        features=(*way.features, "FSDP2"),
        setup=replace(way.setup, is_split=True),
        options={**way.options, "fsdp": True},
    )


def _packed(setup: Setup, measurement: Measured) -> Measured:
    """The measurement of an adapter on a base in 4 bits: the embeddings and the output layer stay as they are."""
    text = setup.model_config.get_text_config()
    ends = (1 if text.tie_word_embeddings else 2) * text.vocab_size * text.hidden_size
    layers = max(0, measurement.size - ends - measurement.gradients // 4)
    saved = int(layers * (measurement.dtype.itemsize - PACKED))
    return replace(
        measurement,
        weights=measurement.weights - saved,
        held=measurement.held - saved,
        peak=measurement.peak - saved,
    )


def _of_way(setup: Setup, way: Way) -> Iterator[Choice]:
    """The plans of one way to train, with each kind of writer; with shards in host memory or shared rows where it fits only so."""
    tokens = setup.prompt_tokens + setup.args.max_completion_length
    plain = list(_with_writers(setup, way))
    yield from plain
    if not way.setup.is_split:
        return
    if not any(choice.plan.fits for choice in plain):
        offloaded = replace(
            way, setup=replace(way.setup, offloads=True), options={**way.options, "fsdp": "full_shard offload"}
        )
        yield from _with_writers(setup, replace(offloaded, features=(*way.features, "offload")))
    if tokens < LONG and any(choice.plan.fits for choice in plain):
        return
    heads = setup.model_config.get_text_config().num_attention_heads
    for size in (n for n in _CONTEXTS if heads % n == 0):
        shared = replace(
            way,
            features=(*way.features, "context parallel"),
            setup=replace(way.setup, context=size),
            options={**way.options, "parallelism_config": {"cp_size": size}},
        )
        yield from _with_writers(setup, shared)


def _with_writers(setup: Setup, way: Way) -> Iterator[Choice]:
    """The fastest plan that fits of each kind of writer, or the smallest where none does."""
    kinds: dict[tuple[str, ...], list[Choice]] = {}
    for features, plan, options in _written(setup, way):
        if refusal_of([name for name in features if name not in ("all weights", "offload", "native")]) is None:
            kinds.setdefault(features, []).append(Choice(features=features, plan=plan, options=options))
    yield from (min(made, key=_rank) for made in kinds.values())


def _written(setup: Setup, way: Way) -> Iterator[tuple[tuple[str, ...], Estimate, dict[str, Any]]]:
    count, completions = setup.gpus, completions_of(setup)
    tensor = _engine_gpus(setup, way)
    for writes, engine, is_vllm, is_asynchronous in (
        ("native", 1, False, False),
        ("vLLM in process", tensor, True, False),
        ("vLLM server", tensor, True, False),
        ("vLLM server", tensor, True, True),
        ("native", 1, False, True),
    ):
        is_apart = writes == "vLLM server" or is_asynchronous
        if is_apart and not is_vllm and count > A_NODE:
            continue  # workers are processes of this machine
        if not is_apart and count % engine:
            continue
        for writers in range(engine, count, engine) if is_apart else (0,):
            learners = count - writers
            if learners % way.setup.context or (learners > A_NODE and learners % A_NODE):
                continue  # a launcher starts equally many processes on each node
            base = with_learners(way.setup, learners, completions)
            if base is None:
                continue
            args = copy.copy(base.args)
            args.use_vllm, args.vllm_tensor_parallel_size = is_vllm, 1 if is_apart else engine
            split = base.is_split and learners > 1
            made = replace(
                base,
                args=args,
                writers=writers,
                engine_gpus=engine,
                is_asynchronous=is_asynchronous,
                is_split=split,
                offloads=base.offloads and split,
            )
            try:
                plan = estimate(made, way.measurement)
            except ConfigError:
                continue  # a batch that does not divide so
            features = (*way.features, writes, *(("asynchronous",) if is_asynchronous else ()))
            yield features, plan, {**way.options, **_options(made, writes)}


def _engine_gpus(setup: Setup, way: Way) -> int:
    """GPUs of a vLLM engine: as few as hold its 16-bit weights."""
    heads = setup.model_config.get_text_config().num_attention_heads
    fitting = (n for n in (1, 2, 4, 8) if heads % n == 0 and 2 * way.measurement.size / n <= _SHARE * setup.gpu.memory)
    return next(fitting, A_NODE)


def _options(setup: Setup, writes: str) -> dict[str, Any]:
    """Options of `covey train` for the writers, and the batch of a learner."""
    args = setup.args
    options: dict[str, Any] = {
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
    }
    if writes != "native":
        options |= {"use_vllm": True, "vllm_mode": "server" if setup.writers else "colocate"}
        if not setup.writers and args.vllm_tensor_parallel_size > 1:
            options["vllm_tensor_parallel_size"] = args.vllm_tensor_parallel_size
    if setup.is_asynchronous:
        options |= {"async_rollouts": True, "max_staleness": 1}
        options |= {} if writes != "native" or setup.writers == 1 else {"rollout_workers": setup.writers}
    return options
