"""The memory of a run without the run: its own learner takes a step on fake tensors, which have shapes and no storage."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from covey.config import GRPOConfig
from covey.kernels import SamplerLinear, footprint
from covey.learner.learner import Learner
from covey.learner.live_memory import FakeBytes, nbytes
from covey.learner.lm_head import chunk_for
from covey.learner.memory_estimate import Memory, allocator_bytes, cache_bytes, enough_tokens, starting_tokens
from covey.learner.packing import Row, tokens_in
from covey.learner.preparation import prepare_for_training
from covey.learner.worst_case import groups_of
from covey.models import disable_dropout, dtype_of, with_adapter
from covey.process.world import World
from covey.rollout.engine import BFLOAT16_FROM
from covey.training.build import RunInputs, build_algorithm, build_learner
from covey.training.sampling import as_dict
from covey.training.teaching import without_teaching
from covey.types import Completion, Prompt

CPU = torch.device("cpu")
_WIDENED = 5
"""Copies in float32 that bitsandbytes makes on a CPU of a parameter in its update, which fake tensors do not enter."""


def dry_run(args: GRPOConfig, model_config: Any, *, peft_config: Any, prompts: int, prompt_tokens: int) -> Memory:
    """Memory of each device for a model of this transformers configuration, of which no weight is loaded.

    `prompts` times `args.num_generations` completions are drawn at a time, all as long as allowed. Fake tensors are those of a
    CPU also where the run is not on one: FlexAttention is compiled and takes none, and what stands in for it holds as much.
    """
    on_cpu = args.use_cpu or not torch.accelerator.is_available()
    with FakeBytes() as live:
        learner = _learner(args, model_config, peft_config, live, on_cpu)
        held, peak, tokens = _step(learner, args, live, prompt_tokens)
    model = learner.policy.model
    own, size = _dtype_of(model), sum(parameter.numel() for parameter in model.parameters())
    samples_in_copy = own == torch.float32 and _samples_in_16_bits(args, size, on_cpu)
    value_bytes = 2 if samples_in_copy else own.itemsize
    drawn = prompts * (prompt_tokens + args.num_generations * args.max_completion_length)
    weights = nbytes([*model.parameters(), *model.buffers()])
    copies = nbytes(learner.reference.weights().values()), nbytes(learner.critic.parameters())
    gradients = nbytes(learner.trainable())
    activations = peak - held - gradients
    allocator = 0
    if on_cpu:
        activations, allocator = _on_a_cpu(learner, activations, tokens, len(live.products))
    return Memory(
        weights=weights,
        reference=copies[0],
        critic=copies[1],
        gradients=gradients,
        optimizer=held - weights - sum(copies),
        activations=activations,
        allocator=allocator,
        sampler=2 * size if samples_in_copy else 0,
        cache=cache_bytes(model_config, drawn, value_bytes),
    )


def _samples_in_16_bits(args: GRPOConfig, size: int, on_cpu: bool) -> bool:
    """True if a float32 model of this size is sampled from in a copy of its weights."""
    if args.rollout_dtype != "auto":
        return args.rollout_dtype != "float32"
    return (
        args.bf16
        or (not on_cpu and args.fp16)
        or (on_cpu and size >= BFLOAT16_FROM and SamplerLinear.has_bfloat16(CPU))
    )


def _on_a_cpu(learner: Learner, activations: int, tokens: int, products: int) -> tuple[int, int]:
    """Activations less what the kernels save of them, and what the allocator keeps."""
    policy = learner.policy
    dtype = policy.compute_dtype or _dtype_of(policy.model)
    saves = footprint(policy.model, dtype)
    layers = 1 if policy.is_checkpointing else policy.model.config.get_text_config().num_hidden_layers
    activations = max(0, activations - saves.saved_a_token * layers * tokens)
    allocator = allocator_bytes(
        activations,
        products * saves.kept_a_product,
        is_checkpointed=policy.is_checkpointing,
        is_adapted=hasattr(policy.model, "peft_config"),
    )
    if type(learner.optimizer).__module__.startswith("bitsandbytes."):
        largest = max(parameter.numel() for parameter in learner.trainable())
        activations = max(activations, _WIDENED * 4 * largest)
    return activations, allocator


def _dtype_of(model: Any) -> torch.dtype:
    found: torch.dtype = next(model.parameters()).dtype
    return found


class _NoTokenizer:
    pad_token_id = 0


def _learner(args: GRPOConfig, model_config: Any, peft_config: Any, live: FakeBytes, on_cpu: bool) -> Learner:
    """The learner of a run with these options, on a model of fake tensors."""
    from transformers import AutoModelForCausalLM

    given, plain = as_dict(args.model_init_kwargs), copy.copy(args)
    plain.max_tokens_per_microbatch = None  # set below, by the device of the run
    auto: Any = AutoModelForCausalLM  # its methods carry no types
    with torch.device("meta"):
        dtype = dtype_of(given.get("dtype"))
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
    if not on_cpu:
        vocabulary = learner.policy.model.get_output_embeddings().weight.shape[0]
        device = torch.accelerator.current_accelerator()
        learner.policy.logits_chunk = chunk_for(vocabulary, args.logits_chunk_tokens, device)
    learner.micro_batcher.max_tokens = starting_tokens(args.max_tokens_per_microbatch, learner.policy, on_cpu=on_cpu)
    learner.micro_batcher.enough_tokens = enough_tokens(args.max_tokens_per_microbatch, on_cpu=on_cpu)
    return learner


def _on_fakes(model: Any) -> Any:
    """The model with a fake tensor on a CPU, made inside of a `FakeTensorMode`, in the place of each that has no storage."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:  # two modules may share one
            found = torch.empty_like(tensor, device=CPU)
            is_trained = tensor.requires_grad
            made[id(tensor)] = nn.Parameter(found, is_trained) if isinstance(tensor, nn.Parameter) else found
        return made[id(tensor)]

    for module in list(model.modules()):
        for held in (module._parameters, module._buffers):
            held.update({name: fake(tensor) for name, tensor in held.items() if tensor is not None})
    return model


_LONG = 4096
"""Tokens of a completion beyond which the peak is continued from that of half and of all of these: it grows with the length."""


def _step(learner: Learner, args: GRPOConfig, live: FakeBytes, prompt_tokens: int) -> tuple[int, int, int]:
    """Bytes that stay after a short step, bytes at the peak of one with the largest micro-batch, and the tokens of that."""
    algorithm = without_teaching(build_algorithm(args))
    algorithm = algorithm.resolve(algorithm.initial_controllers())
    vocabulary = learner.policy.model.get_input_embeddings().num_embeddings
    size, length = args.num_generations, args.max_completion_length

    def peak_of(count: int, prompt: int, answer: int) -> int:
        groups = groups_of(count, prompt, answer, size, vocabulary)
        live.begin()
        learner.step(learner.annotate(groups, algorithm), algorithm, 1)
        return live.peak

    peak_of(size, 4, 4)
    held = live.now
    batches = learner.micro_batcher.batches(_rows(args, prompt_tokens))
    count = len(batches[0])
    for parameter in learner.trainable() if len(batches) > 1 else ():
        parameter.grad = torch.zeros_like(parameter)  # of the micro-batch before
    tokens = tokens_in(batches[0], learner.policy.shares_prompts())
    if length <= _LONG:
        return held, peak_of(count, prompt_tokens, length), tokens
    learner.micro_batcher.max_tokens = learner.micro_batcher.enough_tokens = None  # so many rows in one micro-batch
    half, whole = (peak_of(count, prompt_tokens, answer) for answer in (_LONG // 2, _LONG))
    return held, whole + (length - _LONG) * (whole - half) // (_LONG - _LONG // 2), tokens


def _rows(args: GRPOConfig, prompt_tokens: int) -> list[Row]:
    """The completions of a step on one device, as long as allowed; all tokens are one number in memory."""
    length, nothing = args.max_completion_length, torch.zeros(())
    answer = Completion(token_ids=torch.zeros(1, dtype=torch.long).expand(length), text="", finish="length")
    counts = torch.ones(1, dtype=torch.bool).expand(length)
    prompt = Prompt(uid="longest", token_ids=(0,) * prompt_tokens)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return [Row(prompt, answer, i // args.num_generations, nothing, counts) for i in range(rows)]
