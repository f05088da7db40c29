"""Norms, rotations and gated MLPs of decoder layers in one kernel each on a GPU, by torch.compile.

The modules stay transformers' own, adapters included; only what lies between their products is replaced. A compiled function takes
tensors alone, so one compilation serves every layer and every length. A whole layer is not compiled: its attention is a
kernel of its own, which would cut it at the same places, and activation checkpointing is inside of it in some versions of transformers.
A module is recognised by comparing its output with the formula on random inputs; others are not changed.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from covey.kernels.adapted_layers import products_of
from covey.kernels.compiled_cache import keep_compiled_code
from covey.kernels.formula_shapes import OF_NO_MODEL, FormulaShapes
from covey.kernels.gates import Gate, gated, gated_backward, gated_halves, gated_halves_backward, recognised_gate
from covey.kernels.norms import Norm, recognised_norm, rms_norm
from covey.kernels.rotations import Rotation, as_called, heads_of, replace_rotations, rotated, rotated_backward
from covey.models import decoder_of
from covey.process.memory import is_out_of_memory

logger = logging.getLogger(__name__)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""Children of a decoder layer in which both norms feed linear layers only (pre-norm)."""


# -- the formulas -----------------------------------------------------------------------------------------------------


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `weight`, in their types."""
    wide, upstream = x.float(), gradient.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    unit, weighed = wide * scale, upstream * (weight.float() + offset)
    of_x = scale * (weighed - unit * (weighed * unit).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (upstream * unit).sum(0).to(weight.dtype)


_BACKWARD: dict[Callable[..., Any], Callable[..., Any]] = {
    rms_norm: rms_norm_backward,
    gated: gated_backward,
    gated_halves: gated_halves_backward,
    rotated: rotated_backward,
}


@lru_cache
def strictly_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one kernel, or a few, for any length; the same object each time."""
    keep_compiled_code()
    return torch.compile(function)


@lru_cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`strictly_compiled`; the function itself from the first shape on that the compiler fails for, with the reason in the log."""
    kernel, is_plain = strictly_compiled(function), False

    def run(*args: Any) -> Any:
        nonlocal is_plain
        if is_plain or is_in_torch_dispatch_mode(include_infra_modes=False):
            return function(*args)  # a call in such a mode would make torch skip the compiled code for good
        try:
            return kernel(*args)
        except Exception as error:  # a compiler fails in many ways
            if is_out_of_memory(error):
                raise
            is_plain = True
            message = (str(error).strip().splitlines() or [""])[0]
            logger.warning("%s is computed by PyTorch's operations from now on: %s", function.__name__, message[:200])
            return function(*args)

    return run


class _Fused(torch.autograd.Function):
    """`(formula, compiled, number of tensors, tensors, other arguments)` -> the formula's outputs.

    Compiled functions see neither gradients nor autocast, so each is compiled once for training, scoring and recomputation.
    """

    @staticmethod
    def forward(ctx: Any, formula: Callable[..., Any], compiled: Compile, count: int, *args: Any) -> Any:
        tensors, rest = args[:count], args[count:]
        ctx.save_for_backward(*tensors)
        ctx.kernel, ctx.rest = (formula, compiled), rest
        with torch.autocast(tensors[0].device.type, enabled=False):
            return compiled(formula)(*_of_any_length(*(x.detach() for x in tensors)), *rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        formula, compiled = ctx.kernel
        tensors = [*gradients, *(x.detach() for x in ctx.saved_tensors)]
        with torch.autocast(tensors[0].device.type, enabled=False):
            results = compiled(_BACKWARD[formula])(*_of_any_length(*tensors), *ctx.rest)
        return None, None, None, *results, *(None for _ in ctx.rest)


def _of_any_length(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, with the dimensions that differ between micro-batches marked."""
    for x in tensors:
        places = {2: (0,), 3: (0, 1), 4: (0, 2)}.get(x.ndim, ())
        for place in places:
            torch._dynamo.maybe_mark_dynamic(x, place)
    return tensors


# -- modules that compute them ------------------------------------------------------------------------------------------


def fuse(model: nn.Module, compiled: Compile = compiled) -> int:
    """Let the recognised modules of this model compute the formulas, for good. Returns the number of modules.

    `compiled` makes a kernel of a formula.
    """
    decoder, count = decoder_of(model), 0
    before_products = {
        norm
        for layer in recognisable_layers(decoder)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    }
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for module in getattr(decoder, "layers", nn.ModuleList()).modules():
            if "forward" in module.__dict__:
                continue
            if (kind := recognised_norm(module)) is not None and module._parameters.get("weight") is not None:
                module.__dict__["forward"] = partial(_norm_forward, module, compiled, module in before_products, kind)
                count += 1
            elif (gate := recognised_gate(module)) is not None:
                module.__dict__["forward"] = partial(_mlp_forward, module, compiled, gate)
                count += 1
        replace_rotations(decoder, _rotation, compiled, decoder)
    return count


def is_fused(forward: Any) -> bool:
    """True for no `forward` of a module's own, or for that by which `fuse` computes a norm."""
    return forward is None or (isinstance(forward, partial) and forward.func is _norm_forward)


def _product_dtype(x: Tensor) -> torch.dtype | None:
    """16-bit type of a product of `x` under autocast; None elsewhere, where the modules compute as they are.

    One kernel fewer matters in passes of the learner only, and each further mode would be compiled apart. Nothing is compiled
    while a CUDA graph is captured, which that would break.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _norm_forward(
    norm: Any, compiled: Compile, feeds_products: bool, kind: Norm, /, *args: Any, **others: Any
) -> Tensor:
    dtype = _product_dtype(args[0]) if args else None
    if dtype is None or any(value is not None for value in (*args[1:], *others.values())):  # a gate
        plain: Tensor = type(norm).forward(norm, *args, **others)
        return plain
    x = args[0]
    flat, made = x.reshape(-1, x.shape[-1]), dtype if feeds_products else x.dtype
    output: Tensor = _Fused.apply(rms_norm, compiled, 2, flat, norm.weight, kind.epsilon, made, kind.offset)
    return output.view(x.shape)


def _mlp_forward(mlp: Any, compiled: Compile, kind: Gate, x: Tensor) -> Any:
    if _product_dtype(x) is None:
        return type(mlp).forward(mlp, x)
    formula = gated_halves if kind.is_merged else gated
    products = [mlp.gate_up_proj(x)] if kind.is_merged else products_of(x, mlp.gate_proj, mlp.up_proj)
    flat = [product.reshape(-1, product.shape[-1]) for product in products]
    out = _Fused.apply(formula, compiled, len(flat), *flat, kind.activation)
    return mlp.down_proj(out.view(*x.shape[:-1], out.shape[-1]))


def _rotation(
    original: Callable[..., Any], kind: Rotation, compiled: Compile, of: nn.Module, /, *args: Any, **others: Any
) -> Any:
    """The compiled formula where the tensors are on the device of a fused model's layer, which is `of`; else `original`."""
    xs = heads_of(kind, args, others)
    dtype = None if xs is None else _product_dtype(xs[0])
    if xs is None or dtype is None or xs[0].device != next(of.parameters()).device:
        return original(*args, **others)
    count = len(xs) + 2
    turned = _Fused.apply(rotated, compiled, count, *xs, *args[-2:], dtype, kind.pairs, kind.by_pair)
    return as_called(kind, turned, others)


# -- recognising modules ------------------------------------------------------------------------------------------------


def recognisable_layers(decoder: nn.Module) -> Iterator[Any]:
    """Decoder layers whose children are attention, MLP and the two norms before them."""
    for layer in getattr(decoder, "layers", ()):
        if {name for name, _ in layer.named_children()} == _LAYER:
            yield layer


def is_norm(norm: Any) -> bool:
    """True for RMSNorm times a weight."""
    kind = None if norm is None or "forward" in norm.__dict__ else recognised_norm(norm)
    return kind is not None and kind.offset == 0 and type(getattr(norm, "weight", None)) is nn.Parameter


# -- is there a compiler? -----------------------------------------------------------------------------------------------


def fusing_unavailable_reason(device: torch.device, dtype: torch.dtype, model: Any = None) -> str | None:
    """Reason against compiled formulas on this device, for products in `dtype`; None after a trial that agreed, forward and backward.

    `model`: the trial has its shapes, so that it is their compilation too.
    """
    layers = () if model is None else recognisable_layers(decoder_of(model))
    return triton_unavailable_reason(device) or tried(device, dtype, shapes=FormulaShapes.of(next(iter(layers), None)))


def triton_unavailable_reason(device: torch.device) -> str | None:
    """Reason why nothing can be compiled for this device, by its kind and what is installed; None if there is none."""
    if device.type != "cuda":
        return f"they are compiled for CUDA, and the model is on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "their compiler, Triton, is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (7, 0):
        return f"Triton needs compute capability 7.0, and this GPU has {capability[0]}.{capability[1]}"
    return None


@lru_cache
def tried(
    device: torch.device,
    dtype: torch.dtype,
    compiled: Compile = strictly_compiled,
    shapes: FormulaShapes = OF_NO_MODEL,
) -> str | None:
    """Trial of the three kernels, forward and backward, against PyTorch's operations: None, or the reason of its failure."""
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=draw).to(device)
    narrow = lambda *shape: make(*shape).to(dtype)
    heads, key_heads, width = shapes.heads
    # as layers pass them: other strides compile again
    of_heads = lambda count: narrow(1, 5, count, width).transpose(1, 2)
    cases: tuple[tuple[Callable[..., Any], list[Tensor], tuple[Any, ...]], ...] = (
        (rms_norm, [make(5, shapes.hidden), make(shapes.hidden).to(shapes.weights)], (shapes.epsilon, dtype)),
        (gated, [narrow(5, shapes.inner), narrow(5, shapes.inner)], ()),
        (rotated, [of_heads(heads), of_heads(key_heads), make(1, 5, width), make(1, 5, width)], (dtype, False, False)),
    )
    for formula, tensors, rest in cases:
        try:
            gap = _gap(formula, compiled, tensors, rest)
        except Exception as error:  # a compiler fails in many ways; PyTorch's operations do the same work
            if is_out_of_memory(error):
                raise
            message = (str(error).strip().splitlines() or [""])[0]
            return f"{formula.__name__} does not compile or run here ({type(error).__name__}: {message[:200]})"
        if not gap < 3e-2:
            return f"{formula.__name__} differs from PyTorch's operations by {gap:.1g}"
    return None


def _gap(formula: Callable[..., Any], compiled: Compile, tensors: list[Tensor], rest: tuple[Any, ...]) -> float:
    """Largest relative difference of outputs and gradients, those of the formula by autograd."""
    fused = lambda *leaves: _Fused.apply(formula, compiled, len(leaves), *leaves, *rest)
    results = []
    with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        for function in (lambda *leaves: formula(*leaves, *rest), fused):
            leaves = [x.clone().requires_grad_(i < 2) for i, x in enumerate(tensors)]
            out = function(*leaves)
            parts = out if isinstance(out, tuple) else (out,)
            total = torch.stack([(x.float() * torch.arange(x.shape[-1], device=x.device)).sum() for x in parts]).sum()
            results.append([*(part.detach() for part in parts), *torch.autograd.grad(total, leaves[:2])])
    pairs = zip(*results, strict=True)
    return max(float((mine.double() - other.double()).norm() / other.double().norm()) for other, mine in pairs)
