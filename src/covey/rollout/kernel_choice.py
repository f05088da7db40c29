"""Choice of a forward pass, decode kernels and CUDA graphs, made once when a sampler gets its model."""

import functools
import logging
import os
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from covey.errors import RAW_ERRORS, ConfigError, Unsupported, first_line
from covey.kernels import DecodeKernels, TritonDecode, decode_kernels, has_bfloat16, unavailable_reason
from covey.models import unwrapped
from covey.process.memory import is_out_of_memory
from covey.rollout.autocast import AutocastForward, SamplerPrecision
from covey.rollout.decoder import DecoderForward
from covey.rollout.forward import UNLIMITED, Forward, ModulesForward, plain_cache, verify
from covey.rollout.kv_cache import KVCache
from covey.rollout.sampler import SamplingParams
from covey.rollout.sampling import draw
from covey.rollout.static_kv_cache import NEVER, Attention, StaticKVCache
from covey.rollout.truncation import kernel_options
from covey.rollout.whole_keys import WholeKeysForward, whole_keys_forward
from covey.types import widest_float

logger = logging.getLogger(__name__)
AttentionChoice = Literal["auto", "torch", "triton", "compiled"]
BFLOAT16_FROM = 4_000_000
"""Parameter count from which "auto" samples in bfloat16: 2.5 times as fast at 10 million; at 1 million a step is short anyway."""
LARGE_GROUP = 64
"""Rows of a prompt that Triton's kernels are compiled for when they are verified: the most shared memory that they need."""
LONG = 600
"""Tokens of a prompt, and columns of own keys, that Triton's kernels split over programs."""
SWITCH = "COVEY_CUDA_GRAPHS"
"""Environment variable that turns CUDA graphs off (0) or on (1) where the sampler's argument is None."""


def best_forward(model: Any, dtype: SamplerPrecision, float32_head: bool = False) -> Forward:
    """The fastest way to compute this model in this precision; see `NativeSampler`. Raises Unsupported with the reason."""
    if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
        raise Unsupported("prompt-learning adapters put virtual tokens before the prompt; use LoRA or another kind")
    live = next(unwrapped(model).parameters())
    compute_dtype = live.dtype if dtype == "auto" else getattr(torch, dtype)
    is_large = sum(parameter.numel() for parameter in unwrapped(model).parameters()) >= BFLOAT16_FROM
    if dtype == "auto" and live.dtype == torch.float32 and has_bfloat16(live.device) and is_large:
        compute_dtype = torch.bfloat16
    try:
        return DecoderForward(model, compute_dtype, float32_head)
    except Unsupported as reason:
        in_float32 = float32_head and compute_dtype != torch.float32
        other = None if compute_dtype == live.dtype else compute_dtype
        try:
            plain = ModulesForward(model, in_float32) if other is None else AutocastForward(model, other, in_float32)
        except (Unsupported, *RAW_ERRORS) as error:
            plain = _over_whole_keys(model, other, in_float32, error)
        logger.warning("Completions are computed by the model's own modules, which takes longer: %s.", reason)
        return plain


def _over_whole_keys(model: Any, dtype: torch.dtype | None, float32_head: bool, reason: Exception) -> ModulesForward:
    """The model's own attention over gathered keys, where the engine's attention is ruled out by `reason`, which is raised if that fails."""
    if is_out_of_memory(reason):
        raise reason
    try:
        return whole_keys_forward(model, dtype, float32_head)
    except (Unsupported, *RAW_ERRORS) as error:
        if is_out_of_memory(error):
            raise
        raise reason from error


def captures(requested: bool | None, device: torch.device) -> bool:
    """True if decode steps are captured as CUDA graphs. Raises ConfigError if that is requested for another device than CUDA."""
    setting = os.environ.get(SWITCH, "").strip()
    if setting not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH} is {setting!r}; give 1 to decode with CUDA graphs, 0 to decode without.")
    source = "cuda_graphs=True" if requested is not None else f"{SWITCH}=1"
    choice = requested if requested is not None else setting == "1" if setting else None
    if device.type == "cuda":
        return choice is not False
    if choice:
        raise ConfigError(f"{source} needs a model on a CUDA device, but this one is on {device.type}; leave it out.")
    return False


def verified_kernels(forward: Forward, model: torch.nn.Module, choice: AttentionChoice) -> DecodeKernels | None:
    """C++ decode kernels for a model on a CPU, if they reproduce its logits; None where PyTorch's operations decode.

    Raises ConfigError when they are requested and cannot run, Unsupported when PyTorch's operations differ from the model too.
    """
    if choice == "triton":
        raise ConfigError("attention='triton' is not possible here: it does not read keys that an indexer chooses.")
    shapes = {layer.width for layer in forward.layers if not layer.is_index}
    kernels = (
        decode_kernels(forward.device, forward.dtype, shapes.pop())
        if len(shapes) == 1 and choice != "torch" and not isinstance(forward, WholeKeysForward)
        else None
    )
    if kernels is None and choice == "compiled":
        reason = (
            unavailable_reason() or f"this model has heads or a precision that they are not made for ({forward.dtype})"
        )
        raise ConfigError(f"attention='compiled' is not possible here: {reason}.")
    if kernels is not None:
        try:
            verify(forward, model, new_cache=functools.partial(plain_cache, kernels=kernels))
        except Unsupported as error:
            if choice == "compiled":
                raise
            logger.warning("Decoding with PyTorch's own operations, not with compiled kernels: %s.", error)
        else:
            return kernels
    verify(forward, model)
    return None


def verified_attention(forward: Forward, model: torch.nn.Module, choice: AttentionChoice) -> Attention:
    """Fastest attention that reproduces the model's logits on static buffers: Triton's, or PyTorch's with a warning.

    Raises ConfigError when Triton's kernels are requested and cannot run, Unsupported when PyTorch's differ from the model too.
    """
    if choice != "torch":
        reason = TritonDecode.unavailable_reason(forward.device)
        if reason is not None and choice == "triton":
            raise ConfigError(f"attention='triton' is not possible here: {reason}.")
        if reason is None:
            reason = _why_not_verified(forward, model, choice)
        if reason is None:
            return "triton"
        logger.warning("Decoding with PyTorch's attention kernels: %s.", reason)
    verify(forward, model, new_cache=_cache_with("torch"))
    return "torch"


def _why_not_verified(forward: Forward, model: torch.nn.Module, choice: AttentionChoice) -> str | None:
    """Reason against Triton's kernels; None if they compile, run and agree with the model."""
    try:
        _verify_modules(forward, model)
        verify(forward, model, new_cache=_cache_with("triton"))
        verify(forward, model, new_cache=_cache_with("triton", longest=UNLIMITED), tokens=LONG)
    except Unsupported as error:
        if choice == "triton":
            raise
        return str(error)
    except TritonDecode.errors() as error:
        if choice == "triton" or is_out_of_memory(error):
            raise
        return f"Triton's do not run here ({first_line(error)})"
    return None


def _verify_modules(forward: Forward, model: torch.nn.Module) -> None:
    """Let the modules' norms and rotations compute in kernels, unless they differ from the model then."""
    if not isinstance(forward, ModulesForward):
        return
    errors: tuple[type[Exception], ...] = (Unsupported, *RAW_ERRORS, *TritonDecode.errors())
    try:
        forward.take_kernels()
        verify(forward, model, new_cache=_cache_with("torch"))
    except errors as error:
        if is_out_of_memory(error):
            raise
        forward.in_kernels = None
        logger.warning("Norms and rotations are computed by the model's own modules: %s.", first_line(error))


_draws: WeakKeyDictionary[Forward, dict[SamplingParams, bool]] = WeakKeyDictionary()
"""Forms of the draw that were tried for a forward pass."""


def draws_in_kernels(forward: Forward, params: SamplingParams, choice: AttentionChoice) -> bool:
    """True if Triton's draw reproduces PyTorch's with such parameters, False with a warning; where Triton is requested, an error.

    Tried, and compiled, when a form is first asked for: each of top-k, top-p, min-p, a penalty and greedy decoding is another.
    """
    form = SamplingParams(
        temperature=0.0 if params.is_greedy else 0.7,
        top_k=50 if params.top_k else 0,
        top_p=0.9 if params.top_p < 1 else 1.0,
        min_p=1e-4 if params.min_p else None,
        repetition_penalty=1.3 if params.repetition_penalty != 1 else 1.0,
    )
    tried = _draws.setdefault(forward, {})
    if form not in tried:
        errors: tuple[type[Exception], ...] = (Unsupported, *TritonDecode.errors())
        try:
            verify_draw(forward, form)
            tried[form] = True
        except errors as error:
            if choice == "triton" or is_out_of_memory(error):
                raise
            logger.warning("Tokens are drawn by PyTorch's operations, not by Triton's kernels: %s.", first_line(error))
            tried[form] = False
    return tried[form]


def verify_draw(forward: Forward, form: SamplingParams) -> None:
    """Compare tokens and log-probabilities of Triton's draw with PyTorch's on random logits. Raises Unsupported if they differ.

    The draw advances a scheduler's tables, of as many blocks of the vocabulary as in a decode step: so nothing else is compiled for it.
    """
    generator, rows = torch.Generator().manual_seed(0), 4
    size, device = forward.vocab_size, forward.device
    logits = (3 * torch.randn(rows, size, generator=generator)).to(device, forward.dtype)
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64).to(device, widest_float(device))
    has_seen = form.repetition_penalty != 1
    seen = (torch.rand(rows, size, generator=generator) < 0.5).to(device) if has_seen else None
    expected = draw(logits, uniforms, form, seen=seen)
    numbers = torch.zeros(4, rows, dtype=torch.int64, device=device)
    flags = torch.zeros(2, rows, dtype=torch.bool, device=device)
    tables: dict[str, Any] = {
        **dict(zip(("token", "position", "written", "limit"), numbers, strict=True)),
        "output_row": torch.arange(rows, device=device),
        "live": ~flags[0],
        "stopped": flags[1],
        "first": torch.zeros(rows, dtype=torch.int32, device=device),
        "is_eos": torch.zeros(size, dtype=torch.bool, device=device),
        "tokens": torch.zeros(rows + 1, 1, dtype=torch.int64, device=device),
        "logprobs": torch.zeros(rows + 1, 1, device=device),
        "uniforms": torch.nn.functional.pad(uniforms[:, None], (0, 0, 0, 1)),
        "never": NEVER,
        "ends": True,
    }
    TritonDecode.draw_into(tables, logits, seen=seen, **kernel_options(form))
    tokens, logprobs = (tables[name][:rows, 0] for name in ("tokens", "logprobs"))
    is_advanced = bool((tables["token"] == tokens).all() and (tables["written"] == 1).all())
    if not is_advanced or (seen is not None and not bool(seen.gather(1, tokens[:, None]).all())):
        raise Unsupported("the tables that its draw advances differ from those of PyTorch's")
    is_same = tokens == expected.tokens  # a sum of another order may move a uniform over a token's border
    near = torch.allclose(logprobs[is_same], expected.logprobs[is_same], atol=1e-4)
    if int(is_same.sum()) < rows - 1 or not near:
        raise Unsupported("the tokens that its draw takes differ from those of PyTorch's")


def _cache_with(attention: Attention, longest: int = 8) -> Any:
    """Factory of caches for rows of at most `longest` tokens; with `UNLIMITED` any window hides a key, by a table of biases."""

    def new(forward: Forward, context: int) -> KVCache:
        return StaticKVCache(
            forward.layers,
            forward.device,
            forward.dtype,
            context,
            group_size=2 if attention == "torch" else LARGE_GROUP,
            most_rows=4,
            longest=min(longest, context),
            attention=attention,
            states=forward.states,
        )

    return new
