"""The memory of a run without the run: its own learner takes a step on fake tensors, which have shapes and no storage."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from covey.adapters import with_adapter
from covey.algorithms.reference import averages
from covey.config import GRPOConfig
from covey.data import vocabulary_size
from covey.doctor.layers import continued, few_layers, shortened
from covey.kernels import code_bytes_per_product, has_bfloat16
from covey.learner.learner import Learner
from covey.learner.live_memory import FakeBytes, nbytes
from covey.learner.lm_head import chunk_for
from covey.learner.memory_estimate import (
    Memory,
    allocator_bytes,
    bytes_a_token,
    cache_bytes,
    starting_limits,
    starting_tokens,
    update_bytes,
)
from covey.learner.packing import Row, tokens_in
from covey.learner.preparation import prepare_for_training
from covey.learner.worst_case import groups_of
from covey.models import disable_dropout, dtype_of, unwrapped
from covey.process.device import free_on
from covey.process.world import World
from covey.rollout.kernel_choice import BFLOAT16_FROM
from covey.training.build_algorithm import build_algorithm
from covey.training.build_learner import RunInputs, build_learner
from covey.training.build_sampler import as_dict
from covey.training.teaching import without_teaching
from covey.types import Completion, Prompt

CPU = torch.device("cpu")
_WIDENED = 5
"""Copies in float32 that bitsandbytes makes on a CPU of a parameter in its update, which fake tensors do not enter."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The device that a dry run is made for."""

    on_cpu: bool
    logits: int | None = None
    """Logits that exist at a time on it; None: as many as on the device that is here."""
    memory: int | None = None
    """Bytes of the device; None: what is free on the one that is here."""
    shards: int = 1
    """Devices that share the model."""
    live: Callable[[], FakeBytes] = FakeBytes
    """Factory of the counter of bytes, and of operations where wanted."""

    @classmethod
    def here(cls, args: GRPOConfig) -> Target:
        """The device of a run that starts now."""
        return cls(on_cpu=args.use_cpu or not torch.accelerator.is_available())


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes and seconds of a learner on fake tensors; every number is linear in the layers."""

    size: int
    """Parameters."""
    weights: int
    reference: int
    critic: int
    gradients: int
    held: int
    """Bytes that stay after a step: weights, reference, critic, optimizer state."""
    peak: int
    rows: int
    """Completions of the largest micro-batch."""
    tokens: int
    """Tokens of it."""
    product_code: float
    """Bytes that a CPU's libraries keep for its products."""
    widest: int
    """Parameters of the largest tensor that is trained."""
    scoring: float
    """Seconds in which the micro-batch is scored before it is learnt from; 0 where operations are not counted, as below."""
    learning: float
    """Of its forward and backward pass, and of the update."""
    updating: float
    """Of the update alone."""
    is_checkpointed: bool
    is_adapted: bool
    is_8_bit: bool
    dtype: torch.dtype


def dry_run(args: GRPOConfig, model_config: Any, *, peft_config: Any, prompts: int, prompt_tokens: int) -> Memory:
    """Memory of each device for a model of this transformers configuration, of which no weight is loaded.

    `prompts` times `args.num_generations` completions are drawn at a time, all as long as allowed. Fake tensors are those of a
    CPU also where the run is not on one: FlexAttention is compiled and takes none, and what stands in for it holds as much. A
    model of many layers is continued from two short ones (`layers.py`).
    """
    target = Target.here(args)
    measurement = measured(args, model_config, peft_config=peft_config, prompt_tokens=prompt_tokens, target=target)
    drawn = prompts * (prompt_tokens + args.num_generations * args.max_completion_length)
    return memory_of(measurement, args, model_config, drawn, target)


def memory_of(measurement: Measured, args: GRPOConfig, model_config: Any, drawn: int, target: Target) -> Memory:
    """Memory by kind (weights, gradients, activations, KV cache, ...), where `drawn` tokens are in the cache at a time."""
    samples_in_copy = measurement.dtype == torch.float32 and _samples_in_16_bits(args, measurement.size, target.on_cpu)
    activations, allocator = measurement.peak - measurement.held - measurement.gradients, 0
    if target.on_cpu:
        activations, allocator = _on_a_cpu(measurement, activations)
    return Memory(
        weights=measurement.weights,
        reference=measurement.reference,
        critic=measurement.critic,
        gradients=measurement.gradients,
        optimizer=measurement.held - measurement.weights - measurement.reference - measurement.critic,
        activations=activations,
        allocator=allocator,
        sampler=2 * measurement.size if samples_in_copy else 0,
        cache=cache_bytes(model_config, drawn, 2 if samples_in_copy else measurement.dtype.itemsize),
    )


def measured(args: GRPOConfig, model_config: Any, *, peft_config: Any, prompt_tokens: int, target: Target) -> Measured:
    """A step of the run's learner on fake tensors, continued from short models where there are many layers."""
    few = few_layers(model_config)
    layers = model_config.get_text_config().num_hidden_layers
    models = [shortened(model_config, count) for count in few] if few else [model_config]
    made = []
    for model in models:
        live = target.live()
        with live:
            made.append((_learner(args, model, peft_config, live, target), live))
    tokens = _tokens_of_a_pass(args, made, few, layers, target)
    results = []
    for learner, live in made:
        learner.micro_batcher.limits.max_tokens = tokens
        with live:
            results.append(_count_step(learner, args, live, prompt_tokens))
    return continued(results[0], results[1], few, layers) if few else results[0]


def _tokens_of_a_pass(
    args: GRPOConfig,
    made: Sequence[tuple[Learner, FakeBytes]],
    few: tuple[int, int] | None,
    layers: int,
    target: Target,
) -> int | None:
    """Tokens of one forward pass at the start, of the whole model."""
    limit, learners = args.max_tokens_per_microbatch, [learner for learner, _ in made]

    def whole(values: Sequence[float]) -> float:
        return values[0] if few is None else values[1] + (layers - few[1]) * (values[1] - values[0]) / (few[1] - few[0])

    def each() -> float:
        sizes = []
        for learner, live in made:
            with live:
                sizes.append(bytes_a_token(learner.policy, is_warm=True))
        return whole(sizes)

    def room() -> float:
        weights = whole(
            [nbytes([*learner.policy.model.parameters(), *learner.policy.model.buffers()]) for learner in learners]
        )
        here = torch.accelerator.current_accelerator() or CPU
        free = free_on(here) if target.memory is None else target.memory
        return free - (weights + whole([update_bytes(learner.policy) for learner in learners])) / target.shards

    return starting_tokens(limit, learners[0].policy, on_cpu=target.on_cpu, bytes_each=each, room=room)


def _count_step(learner: Learner, args: GRPOConfig, live: FakeBytes, prompt_tokens: int) -> Measured:
    held, peak, (rows, tokens), seconds = _step(learner, args, live, prompt_tokens)
    policy, model = learner.policy, learner.policy.model
    code_each = code_bytes_per_product(policy.compute_dtype or _dtype_of(model))
    trained = learner.trainable()
    return Measured(
        size=sum(parameter.numel() for parameter in model.parameters()),
        weights=nbytes([*model.parameters(), *model.buffers()]),
        reference=nbytes([*learner.reference.weights().values(), *getattr(learner.reference, "exact", {}).values()]),
        critic=nbytes(learner.critic.parameters()),
        gradients=nbytes(trained),
        held=held,
        peak=peak,
        rows=rows,
        tokens=tokens,
        product_code=float(len(live.products) * code_each),
        widest=max(parameter.numel() for parameter in trained),
        scoring=seconds[0],
        learning=seconds[1],
        updating=seconds[2],
        is_checkpointed=policy.is_checkpointing,
        is_adapted=hasattr(model, "peft_config"),
        is_8_bit=type(learner.optimizer).__module__.startswith("bitsandbytes."),
        dtype=_dtype_of(model),
    )


def _samples_in_16_bits(args: GRPOConfig, size: int, on_cpu: bool) -> bool:
    """True if a float32 model of this size is sampled from in a copy of its weights."""
    if args.rollout_dtype != "auto":
        return args.rollout_dtype != "float32"
    return args.bf16 or (not on_cpu and args.fp16) or (on_cpu and size >= BFLOAT16_FROM and has_bfloat16(CPU))


def _on_a_cpu(measurement: Measured, activations: int) -> tuple[int, int]:
    """Activations, and the allocator's overhead."""
    allocator = allocator_bytes(
        activations,
        int(measurement.product_code),
        is_checkpointed=measurement.is_checkpointed,
        is_adapted=measurement.is_adapted,
    )
    if measurement.is_8_bit:
        activations = max(activations, _WIDENED * 4 * measurement.widest)
    return activations, allocator


def _dtype_of(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


class _NoTokenizer:
    pad_token_id = 0


def _learner(args: GRPOConfig, model_config: Any, peft_config: Any, live: FakeBytes, target: Target) -> Learner:
    """The learner of a run with these options, on a model of fake tensors."""
    from transformers import AutoModelForCausalLM

    init_kwargs, plain = as_dict(args.model_init_kwargs), copy.copy(args)
    plain.max_tokens_per_microbatch = None  # set below, by the device of the run
    auto: Any = AutoModelForCausalLM  # its methods carry no types
    with torch.device("meta"):
        dtype = dtype_of(init_kwargs.get("dtype", init_kwargs.get("torch_dtype")))
        model = auto.from_config(model_config, dtype=dtype, trust_remote_code=args.trust_remote_code)
        model = with_adapter(model, peft_config)
    if args.disable_dropout:
        disable_dropout(model)
    with live.fakes, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # a copy of a model does it
        model = prepare_for_training(_on_fakes(model), args)
        algorithm, nothing = without_teaching(build_algorithm(args)), None
        parts = RunInputs(plain, model, _NoTokenizer(), (), algorithm, nothing, nothing, World(device=CPU))  # type: ignore[arg-type]
        learner = build_learner(parts, 1, (None, None), is_off_policy=False)
        if averages(algorithm.reference):
            learner.reference.mix(learner.policy, alpha=0.5)
    if not target.on_cpu:
        vocabulary = unwrapped(learner.policy.model).get_output_embeddings().weight.shape[0]
        device = None if target.logits else torch.accelerator.current_accelerator()
        learner.policy.logits_chunk = chunk_for(vocabulary, args.logits_chunk_tokens, device, elements=target.logits)
    limit, batch = args.max_tokens_per_microbatch, args.per_device_train_batch_size
    room = starting_limits(limit, batch, batch * args.gradient_accumulation_steps, on_cpu=target.on_cpu)
    learner.limits.max_rows, learner.limits.enough_tokens = room.max_rows, room.enough_tokens
    return learner


def _on_fakes(model: Any) -> Any:
    """The model with a fake tensor on a CPU, made inside of a `FakeTensorMode`, in the place of each that has no storage."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:  # two modules may share one
            empty = torch.empty_like(tensor, device=CPU)
            is_trained = tensor.requires_grad
            made[id(tensor)] = nn.Parameter(empty, is_trained) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in list(model.modules()):
        for held in (module._parameters, module._buffers):
            held.update({name: fake(tensor) for name, tensor in held.items() if tensor is not None})
    return model


_LONG = 4096
"""Tokens of a completion beyond which the peak is continued from that of half and of all of these: it grows with the length."""


def _step(
    learner: Learner, args: GRPOConfig, live: FakeBytes, prompt_tokens: int
) -> tuple[int, int, tuple[int, int], list[float]]:
    """Bytes that stay after an update, bytes at the peak of a step with the largest micro-batch, and its completions and tokens.

    The list is of `Measured.scoring`, `learning`, `updating`.
    """
    algorithm = without_teaching(build_algorithm(args))
    algorithm = algorithm.resolve(algorithm.initial_controllers())
    vocabulary = vocabulary_size(learner.policy.model)
    size, length = args.num_generations, args.max_completion_length
    seconds = list[float]()

    def peak_of(count: int, prompt: int, answer: int) -> int:
        groups = groups_of(count, prompt, answer, size, vocabulary)
        live.begin()
        before = live.seconds
        groups = learner.annotate(groups, algorithm)
        between = live.seconds
        learner.step(groups, algorithm, 1)
        seconds[:2] = [between - before, live.seconds - between]
        return live.peak

    updating = _first_update(learner, live)
    held = live.now
    batches = learner.micro_batcher.batches(_rows(args, prompt_tokens))
    count = len(batches[0])
    for parameter in learner.trainable() if len(batches) > 1 else ():
        parameter.grad = torch.zeros_like(parameter)  # of the micro-batch before
    sizes = count, tokens_in(batches[0], learner.policy.shares_prompts())
    if length <= _LONG:
        return held, peak_of(count, prompt_tokens, length), sizes, [*seconds, updating]
    limits = learner.micro_batcher.limits
    limits.max_tokens = limits.enough_tokens = None  # so many rows in one micro-batch
    half, whole = ((peak_of(count, prompt_tokens, answer), *seconds) for answer in (_LONG // 2, _LONG))
    times = (length - _LONG) / (_LONG - _LONG // 2)
    peak, *spent = (b + times * (b - a) for a, b in zip(half, whole, strict=True))
    return held, int(peak), sizes, [*spent, updating]


def _first_update(learner: Learner, live: FakeBytes) -> float:
    """Allocate optimizer state with one fake update. Returns the seconds of an update."""
    for parameter in learner.trainable():
        parameter.grad = torch.zeros_like(parameter)
    before = live.seconds
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return live.seconds - before


def _rows(args: GRPOConfig, prompt_tokens: int) -> list[Row]:
    """The completions of a step on one device, as long as allowed; all tokens are one number in memory."""
    length, nothing = args.max_completion_length, torch.zeros(())
    answer = Completion(token_ids=torch.zeros(1, dtype=torch.long).expand(length), text="", finish="length")
    counts = torch.ones(1, dtype=torch.bool).expand(length)
    prompt = Prompt(uid="longest", token_ids=(0,) * prompt_tokens)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return [Row(prompt, answer, i // args.num_generations, nothing, counts) for i in range(rows)]
