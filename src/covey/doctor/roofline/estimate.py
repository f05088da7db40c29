"""Memory and seconds of a step of a run on given GPUs, from the run's own learner on fake tensors and the roofline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from covey.config import GRPOConfig
from covey.config.batches import batch_arithmetic
from covey.doctor.dry_run import Measured, Target, measured, memory_of
from covey.doctor.roofline.gpus import A_NODE, FOLDER, HOST_LINK, HOST_READS, Gpu
from covey.doctor.roofline.rollout import PASSES_OF_LOGITS, Decoding, kernels_of
from covey.learner.live_memory import FakeBytes
from covey.learner.lm_head import BYTES_AN_ELEMENT, elements_of
from covey.learner.memory_estimate import attention_sizes, cache_bytes


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """A teacher in the learners' processes: a forward pass over the completions, by weights of its own or the policy's."""

    parameters: int
    weights: int
    """Bytes of its own weights."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run and the GPUs that it is planned for."""

    args: GRPOConfig
    model_config: Any
    """transformers' configuration of the model."""
    gpu: Gpu
    gpus: int
    """GPUs that learn, and write where no others do."""
    writers: int = 0
    """GPUs that only write: of a vLLM server, or of workers; 0: those that learn write too, in turn."""
    engine_gpus: int = 1
    """GPUs of one engine of a vLLM server (tensor parallel)."""
    is_asynchronous: bool = False
    """Writers work while the learners do."""
    context: int = 1
    """GPUs that share out the tokens of each row."""
    teachers: tuple[Teaching, ...] = ()
    is_split: bool = False
    """FSDP2: each device holds a shard of weights, gradients and optimizer state."""
    offloads: bool = False
    """The shards, their gradients and the optimizer's state are in host memory."""
    host_memory: int | None = None
    """Bytes of host memory of a node; None: not known, and not judged."""
    adapter: Any = None
    prompt_tokens: int = 512
    mean_tokens: float | None = None
    """Mean tokens of a completion; None: all are as long as allowed."""

    @property
    def mean(self) -> float:
        """Mean tokens of a completion."""
        return min(self.mean_tokens or self.args.max_completion_length, self.args.max_completion_length)

    @property
    def shards(self) -> int:
        return self.gpus if self.is_split else 1

    def measure(self) -> Measured:
        """A step with the largest micro-batch on fake tensors, its operations timed on the GPU."""
        memory = int(self.gpu.memory_gb * 1e9)
        live = partial(TimedBytes, self.gpu)
        target = Target(on_cpu=False, logits=elements_of(memory), memory=self.gpu.memory, shards=self.shards, live=live)
        return measured(
            self.args, self.model_config, peft_config=self.adapter, prompt_tokens=self.prompt_tokens, target=target
        )

    def with_rows(self, rows: int) -> Setup:
        """The same setup with this many completions in a device's micro-batch."""
        args = copy.copy(self.args)
        args.per_device_train_batch_size, args.max_tokens_per_microbatch = rows, None
        return replace(self, args=args)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on each device, by what they hold."""

    weights: int
    reference: int
    critic: int
    teacher: int = 0
    gradients: int
    optimizer: int
    gathered: int
    """Gathered layers of a sharded model."""
    activations: int
    sampler: int
    """The sampler's copy of the weights."""
    cache: int
    """KV cache: of all completions, or of as many as fit."""

    @property
    def stays(self) -> int:
        return self.weights + self.reference + self.critic + self.teacher + self.optimizer

    @property
    def learning(self) -> int:
        """Bytes at the peak of an update."""
        return self.stays + self.gradients + self.activations + self.gathered

    @property
    def peak(self) -> int:
        return max(self.learning, self.stays + self.sampler + self.cache)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one optimizer step, by part."""

    rollout: float
    scoring: float
    """Log-probabilities of the policy at rollout time and of the reference, where the algorithm needs them."""
    teacher: float = 0.0
    """Forward passes of teachers in the process."""
    update: float
    sync: float
    """The new weights on their way to the sampler."""
    overlaps: bool = False
    """The rollout of the next step goes on while this one is learnt."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {name: value for name, value in asdict(self).items() if name != "overlaps"}

    @property
    def step(self) -> float:
        learning = self.scoring + self.teacher + self.update
        return (max(self.rollout, learning) if self.overlaps else self.rollout + learning) + self.sync


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory and time of a run on its GPUs."""

    setup: Setup
    measurement: Measured
    held: Held
    seconds: Seconds
    decoding: Decoding
    completions: int
    """A step."""
    host: int = 0
    """Bytes in the host memory of each node."""
    writer: int = 0
    """Bytes on each GPU that only writes: weights, keys and values."""

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.setup.gpus + self.setup.writers

    @property
    def fits(self) -> bool:
        return self.fits_devices and self.fits_hosts

    @property
    def fits_devices(self) -> bool:
        """True if a device holds the peak, and the keys and values of a completion."""
        return self.held.peak <= self.setup.gpu.memory and self.decoding.room > 0

    @property
    def fits_hosts(self) -> bool:
        """True if a node's host memory holds what is offloaded, as far as it is known."""
        return self.setup.host_memory is None or self.host <= self.setup.host_memory


def estimate(setup: Setup, measurement: Measured | None = None) -> Estimate:
    """The plan for this setup. Raises ConfigError where its batch does not divide. `measurement`: of `setup.measure()`, where it was made before."""
    measurement = measurement or setup.measure()
    counts = batch_arithmetic(setup.args, setup.gpus, num_prompts=1)
    held, decoding, host = _memory_of(setup, measurement, counts.completions_per_generation)
    steps = counts.optimizer_steps_per_generation
    engines = max(1, (setup.writers or setup.gpus) // decoding.gpus)
    share = -(-counts.completions_per_generation // engines)
    group = setup.args.num_generations
    tokens = share * (setup.mean + setup.prompt_tokens / group)
    rolled = decoding.seconds(share, group, setup.prompt_tokens, setup.mean, setup.args.max_completion_length)
    scoring, update = _learning(setup, measurement, counts.completions_per_step)
    seconds = Seconds(
        rollout=rolled / steps,
        scoring=scoring,
        teacher=_teaching(setup, measurement, counts.completions_per_step),
        update=update,
        sync=_sync(setup, measurement) / steps,
        overlaps=setup.is_asynchronous,
    )
    writer = int(decoding.weights / decoding.gpus + min(decoding.room, decoding.key_bytes * tokens) / decoding.gpus)
    return Estimate(
        setup=setup,
        measurement=measurement,
        held=held,
        seconds=seconds,
        decoding=decoding,
        completions=counts.completions_per_step,
        host=host,
        writer=writer if setup.writers else 0,
    )


def _memory_of(setup: Setup, measurement: Measured, completions: int) -> tuple[Held, Decoding, int]:
    """Memory of each device, its decoding, and bytes in the host memory of a node."""
    args, shards = setup.args, setup.shards
    prompts = -(-completions // args.num_generations // setup.gpus)
    drawn = prompts * (setup.prompt_tokens + args.num_generations * args.max_completion_length)
    whole = memory_of(measurement, args, setup.model_config, drawn, Target(on_cpu=False))
    writes_here, is_vllm = not setup.writers, args.use_vllm
    copied = bool(whole.sampler) or is_vllm
    item = 2 if copied else measurement.dtype.itemsize
    split = args.vllm_tensor_parallel_size if is_vllm and writes_here else setup.engine_gpus
    gathers_whole = setup.is_split and not is_vllm  # vLLM takes the weights a layer at a time
    sampled = (item * measurement.size // split if copied else 0) + (measurement.weights if gathers_whole else 0)
    gathered = _gathered_bytes(setup, measurement) if setup.is_split and setup.gpus > 1 else 0
    sharded = {
        name: -(-getattr(whole, name) // shards)
        for name in ("weights", "reference", "critic", "gradients", "optimizer")
    }
    sharded["teacher"] = -(-sum(teacher.weights for teacher in setup.teachers) // shards)
    host = sum(sharded.values()) * min(setup.gpus, A_NODE) if setup.offloads else 0
    sharded = dict.fromkeys(sharded, 0) if setup.offloads else sharded
    activations = _of_a_context(setup, measurement, whole.activations)
    held = Held(**sharded, gathered=gathered, activations=activations, sampler=sampled * writes_here, cache=0)
    room = setup.gpu.memory - (held.stays + held.sampler if writes_here else item * measurement.size // split)
    text = setup.model_config.get_text_config()
    decoding = Decoding(
        gpu=setup.gpu,
        gpus=split,
        weights=item * measurement.size,
        parameters=measurement.size,
        key_bytes=cache_bytes(setup.model_config, 1, item),
        room=max(0, room) * split,
        item_bytes=item,
        kernels=kernels_of(text.model_type, text.num_hidden_layers, is_vllm=is_vllm),
        logit_bytes=PASSES_OF_LOGITS * item * text.vocab_size,
        is_replayed=is_vllm or args.cuda_graphs is not False,
        shares_prompts=not is_vllm,
    )
    return replace(held, cache=min(whole.cache, max(0, room)) * writes_here), decoding, host


def _of_a_context(setup: Setup, measurement: Measured, activations: int) -> int:
    """Bytes of activations on each GPU of a context: a share of the tokens' and a chunk of logits, of its own tokens at most."""
    if setup.context == 1:
        return activations
    logits = measurement.tokens // setup.context * setup.model_config.get_text_config().vocab_size
    chunk = min(activations, BYTES_AN_ELEMENT * min(int(logits), elements_of(int(setup.gpu.memory_gb * 1e9))))
    return max(chunk, activations // setup.context)


def _gathered_bytes(setup: Setup, measurement: Measured) -> int:
    """Bytes that FSDP2 holds gathered at a time: the embeddings and the head, this layer and the next, and their gradients."""
    text = setup.model_config.get_text_config()
    tables = 1 if text.tie_word_embeddings else 2
    ends = min(measurement.weights, tables * text.vocab_size * text.hidden_size * measurement.dtype.itemsize)
    layer = (measurement.weights - ends) // text.num_hidden_layers
    trained = measurement.gradients / measurement.weights
    return int(ends * (1 + trained) + layer * (2 + trained))


def _learning(setup: Setup, measurement: Measured, completions: int) -> tuple[float, float]:
    """Seconds of scoring and of the update of `completions`, with what has to be moved between devices.

    Movement overlaps with arithmetic; whichever is longer counts.
    """
    args, gpus = setup.args, setup.gpus
    rows = completions / (gpus // setup.context)
    real = rows * setup.mean + max(1.0, rows / args.num_generations) * setup.prompt_tokens
    passes = max(1.0, real / measurement.tokens)
    share = min(1.0, real / measurement.tokens) / setup.context
    moved = _exchanged(setup, min(real, measurement.tokens))
    one_score = measurement.scoring * share + (moved if measurement.scoring else 0.0)
    one_pass = (measurement.learning - measurement.updating) * share + 3 * moved  # forward, again, backward
    update = measurement.updating / setup.shards
    there = (gpus - 1) / gpus / setup.gpu.sends(gpus)
    if setup.is_split:
        gather, scatter = measurement.weights * there, measurement.gradients * there
        if setup.offloads:
            gather = max(gather, measurement.weights / setup.shards / HOST_LINK)
            scatter = max(scatter, measurement.gradients / setup.shards / HOST_LINK)
            update = _host_update(setup, measurement)
        scoring = passes * max(one_score, gather) if one_score else 0.0
        return scoring, passes * max(one_pass, 2 * gather + scatter) + update
    summed = 2 * measurement.gradients * there
    return passes * one_score, (passes - 1) * one_pass + max(one_pass, summed) + update


def _exchanged(setup: Setup, tokens: float) -> float:
    """Seconds of a forward pass over `tokens` in which the GPUs of a context exchange queries, keys, values and results."""
    if setup.context == 1:
        return 0.0
    sizes = attention_sizes(setup.model_config)
    values = sum(2 * (heads + max(keys, setup.context)) * width for heads, keys, width in sizes)
    sent = tokens / setup.context * values * (2 if setup.args.bf16 else 4)
    return float(sent * (setup.context - 1) / setup.context / setup.gpu.sends(setup.context))


def _teaching(setup: Setup, measurement: Measured, completions: int) -> float:
    """Seconds of the teachers' forward passes over the completions of a step, each behind its prompt."""
    tokens = completions / setup.gpus * (setup.mean + setup.prompt_tokens)
    item = 2 if setup.args.bf16 else 4
    each = [
        max(2 * teacher.parameters * tokens / setup.gpu.flops(item), teacher.weights / setup.gpu.reads)
        for teacher in setup.teachers
    ]
    return sum(each)


def _host_update(setup: Setup, measurement: Measured) -> float:
    """Seconds of an optimizer step in host memory, whose processes share it: weights and state read and written, gradients read."""
    state = measurement.held - measurement.weights - measurement.reference - measurement.critic
    moved = 3 * measurement.gradients + 2 * state
    return moved / setup.shards * min(setup.gpus, A_NODE) / HOST_READS


def _sync(setup: Setup, measurement: Measured) -> float:
    """Seconds to bring new weights to the sampler: to writers through a folder or as a broadcast, here gathered or copied in memory."""
    gather = 0.0
    if setup.is_split:
        gather = measurement.weights * (setup.gpus - 1) / setup.gpus / setup.gpu.sends(setup.gpus)
        gather = max(gather, measurement.weights / setup.shards / HOST_LINK) if setup.offloads else gather
    if setup.writers:
        sent = measurement.gradients if measurement.is_adapted else 2 * measurement.size
        is_broadcast = setup.args.vllm_transport == "nccl" and setup.args.use_vllm
        return gather + sent / (setup.gpu.sends(setup.gpus + setup.writers) if is_broadcast else FOLDER)
    return gather if setup.is_split else (measurement.weights + 2 * measurement.size) / setup.gpu.reads


aten = torch.ops.aten


class TimedBytes(FakeBytes):
    """`FakeBytes` that adds up seconds: an operation takes as long as its arithmetic or its bytes, whichever is longer.

    Arithmetic is that of PyTorch's FLOP counter. The estimate is the one of `torch.distributed._tools.RuntimeEstimator`, which
    asks the GPU itself for its peaks and so needs one. Views take no time.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.gpu = gpu

    def cost(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
        if func.is_view or func in _FREE:
            return 0.0
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        moved = sum(x.numel() * x.element_size() for x in tensors) / self.gpu.reads
        count = _FLOPS.get(func._overloadpacket)
        if count is None or not tensors:
            return moved
        flops = count(*args, **kwargs, out_val=result)
        return max(moved, flops / self.gpu.flops(tensors[0].element_size()))


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of attention's forward pass, query [.., S, D], key [.., T, D], value [.., T, E]: two products of all pairs."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Five products of all pairs, one of which computes the scores again."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


_FLOPS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_FREE = {aten.detach.default, aten.empty_like.default, aten._unsafe_view.default, aten._local_scalar_dense.default}
"""Operations that move nothing."""
