"""Norms, rotations and gated MLPs of decoder layers in one kernel each on a GPU, by torch.compile.

The modules stay transformers' own, adapters included; only what lies between their products is replaced. A compiled function takes
tensors alone, so one compilation serves every layer and every length. A whole layer is not compiled: its attention is a
kernel of its own, which would cut it at the same places, and activation checkpointing is inside of it in some versions of transformers.
A module is recognised by comparing its output with the formula on random inputs; others are not changed.
"""

import importlib.util
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from covey.errors import first_line
from covey.kernels.adapted_layers import products_of
from covey.kernels.compile import keep_compiled_code
from covey.kernels.gates import Gate, gated, gated_backward, gated_halves, gated_halves_backward, recognised_gate
from covey.kernels.norms import Norm, feeding_products, recognised_norm, rms_norm
from covey.kernels.rotations import Rotation, as_called, heads_of, replace_rotations, rotated, rotated_backward
from covey.kernels.trials import outcome, relative_gap
from covey.models import autocast_dtype, decoder_of
from covey.process.memory import is_out_of_memory

logger = logging.getLogger(__name__)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

_ELEMENTS = 2**22
"""Numbers of the largest tensor of a trial, about."""

_here = threading.local()  # `is_sampling`: this thread's passes are a sampler's
_agreed: dict[Hashable, bool] = {}
"""Forms that were tried: a formula, its compiler, the types and widths of its tensors, and its other arguments."""


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
            logger.warning(
                "%s is computed by PyTorch's operations from now on: %s", function.__name__, first_line(error)[:200]
            )
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
        for place in _LENGTHS[x.ndim]:
            torch._dynamo.maybe_mark_dynamic(x, place)
    return tensors


_LENGTHS: tuple[tuple[int, ...], ...] = ((), (), (0,), (0, 1), (0, 2))
"""Dimensions that differ between micro-batches, by the number of dimensions: rows, or batch and tokens."""


def computed(formula: Callable[..., Any], compiled: Compile, tensors: Sequence[Tensor], rest: tuple[Any, ...]) -> Any:
    """The formula's outputs by its kernel; None for a form whose kernel failed or differed when it was first met, with gradients."""
    types = tuple([(x.dtype, x.shape[1], x.shape[3]) if x.ndim == 4 else (x.dtype, x.shape[-1]) for x in tensors])
    form = formula, compiled, tensors[0].device, types, rest
    if form not in _agreed and not is_in_torch_dispatch_mode():  # an estimate of memory has no numbers
        reason = tried(formula, compiled, tensors, rest)
        _agreed[form] = reason is None
        if reason is not None:
            shapes = (f"{str(dtype).removeprefix('torch.')} {sizes}" for dtype, *sizes in types)
            name = f"{formula.__name__} of {', '.join(shapes)} {rest}"
            logger.warning("%s is computed by PyTorch's operations: its kernel %s.", name, reason)
    return _Fused.apply(formula, compiled, len(tensors), *tensors, *rest) if _agreed.get(form, True) else None


# -- modules that compute them ------------------------------------------------------------------------------------------


def fuse(model: nn.Module, compiled: Compile = compiled, run: Callable[[], Tensor] | None = None) -> int:
    """Let the recognised modules of this model compute the formulas, for good. Returns the number of modules.

    `compiled` makes a kernel of a formula. `run`: a pass of a few tokens, as the learner makes it. It shows which norms feed products
    alone, and is then made once more, so that all forms of this model are tried now. Without it each is tried when it is first met.
    """
    decoder, kinds = decoder_of(model), dict[nn.Module, Norm | Gate]()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for module in getattr(decoder, "layers", nn.ModuleList()).modules():
            if "forward" in module.__dict__:
                continue
            norm = recognised_norm(module) if module._parameters.get("weight") is not None else None
            if (kind := norm or recognised_gate(module)) is not None:
                kinds[module] = kind
        norms = [module for module, kind in kinds.items() if isinstance(kind, Norm)]
        before_products = set() if run is None else set(feeding_products(decoder, norms, run))
        for module, kind in kinds.items():
            if isinstance(kind, Norm):
                forward = partial(_norm_forward, module, compiled, module in before_products, kind)
            else:
                forward = partial(_mlp_forward, module, compiled, kind)
            module.__dict__["forward"] = forward
        replace_rotations(decoder, _rotation, compiled, decoder)
        if run is not None:
            run()
    return len(kinds)


def is_fused(forward: Any) -> bool:
    """True for no `forward` of a module's own, or for that by which `fuse` computes a norm."""
    return forward is None or (isinstance(forward, partial) and forward.func is _norm_forward)


@contextmanager
def sampling() -> Iterator[None]:
    """Context of a sampler's pass: this thread's passes compute no formula, whether they are captured in a CUDA graph or not."""
    before, _here.is_sampling = getattr(_here, "is_sampling", False), True
    try:
        yield
    finally:
        _here.is_sampling = before


def _product_dtype(x: Tensor) -> torch.dtype | None:
    """16-bit type of a product of `x` under autocast; None elsewhere, where the modules compute as they are.

    One kernel fewer matters in passes of the learner only, and each further mode would be compiled apart.
    """
    return None if getattr(_here, "is_sampling", False) else autocast_dtype(x.device.type)


def _norm_forward(
    norm: Any, compiled: Compile, feeds_products: bool, kind: Norm, /, *args: Any, **others: Any
) -> Tensor:
    dtype, output = _product_dtype(args[0]) if args else None, None
    if dtype is not None and all(value is None for value in (*args[1:], *others.values())):  # else a gate
        x = args[0]
        flat, made = x.reshape(-1, x.shape[-1]), dtype if feeds_products else x.dtype
        output = computed(rms_norm, compiled, (flat, norm.weight), (kind.epsilon, made, kind.offset))
    plain: Tensor = type(norm).forward(norm, *args, **others) if output is None else output.view(x.shape)
    return plain


def _mlp_forward(mlp: Any, compiled: Compile, kind: Gate, x: Tensor) -> Any:
    if _product_dtype(x) is None:
        return type(mlp).forward(mlp, x)
    formula: Callable[..., Tensor] = gated_halves if kind.is_merged else gated
    products = [mlp.gate_up_proj(x)] if kind.is_merged else products_of(x, mlp.gate_proj, mlp.up_proj)
    flat = [product.reshape(-1, product.shape[-1]) for product in products]
    out = computed(formula, compiled, flat, (kind.activation,))
    out = formula(*flat, kind.activation) if out is None else out
    return mlp.down_proj(out.view(*x.shape[:-1], out.shape[-1]))


def _rotation(
    original: Callable[..., Any], kind: Rotation, compiled: Compile, of: nn.Module, /, *args: Any, **others: Any
) -> Any:
    """The compiled formula where the tensors are on the device of a fused model's layer, which is `of`; else `original`."""
    xs = heads_of(kind, args, others)
    dtype = None if xs is None else _product_dtype(xs[0])
    if xs is None or dtype is None or xs[0].device != next(of.parameters()).device:
        return original(*args, **others)
    turned = computed(rotated, compiled, (*xs, *args[-2:]), (dtype, kind.pairs, kind.by_pair))
    return original(*args, **others) if turned is None else as_called(kind, turned, others)


# -- do compiled formulas agree? -----------------------------------------------------------------------------------------


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


def tried(
    formula: Callable[..., Any], compiled: Compile, tensors: Sequence[Tensor], rest: tuple[Any, ...]
) -> str | None:
    """Trial of a formula's kernels, forward and backward, on random numbers in the form of `tensors`: None, or how it failed."""
    # apart from the pass around it
    with saved_tensors_hooks(lambda x: x, lambda x: x), torch.inference_mode(False):
        strictly = strictly_compiled if compiled is _COMPILED else compiled
        gap = outcome(lambda: _gap(formula, strictly, tensors, rest))
    if isinstance(gap, str):
        return f"does not compile or run here {gap}"
    return None if gap < 5e-3 else f"differs from them by {gap:.1g}"  # the rounding of both is 1e-4


_COMPILED = compiled


def _gap(formula: Callable[..., Any], compiled: Compile, tensors: Sequence[Tensor], rest: tuple[Any, ...]) -> float:
    """Largest relative difference of outputs and gradients, those of the formula by autograd."""
    most = 32_749 if tensors[0].is_cuda else 509  # as a pass has, and no multiple of a block
    numbers = max(
        math.prod(max(n, 1) for i, n in enumerate(x.shape) if i not in _LENGTHS[x.ndim][-1:]) for x in tensors
    )
    rows = min(most, max(16, _ELEMENTS // numbers))
    draw = torch.Generator(tensors[0].device).manual_seed(0)
    drawn = [_drawn_like(x, rows, draw) for x in tensors]
    count = len(tensors) - 2 * (formula is rotated)  # tables have no gradient
    fused = lambda *leaves: _Fused.apply(formula, compiled, len(leaves), *leaves, *rest)
    results, slopes = list[list[Tensor]](), list[Tensor]()
    with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        for function in (lambda *leaves: formula(*leaves, *rest), fused):
            leaves = [x.clone().requires_grad_(i < count) for i, x in enumerate(drawn)]
            out = function(*leaves)
            parts = out if isinstance(out, tuple) else (out,)
            slopes = slopes or [_drawn_like(x, rows, draw) for x in parts]
            results.append([*(part.detach() for part in parts), *torch.autograd.grad(parts, leaves[:count], slopes)])
    theirs, mine = results
    return relative_gap(mine, theirs)


def _drawn_like(x: Tensor, rows: int, draw: torch.Generator) -> Tensor:
    """Random numbers with the type and the order of strides of `x`, for `rows` rows or tokens: other strides compile again."""
    shape, lengths = [max(size, 1) for size in x.shape], _LENGTHS[x.ndim]
    if lengths:
        shape[lengths[-1]] = rows
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda i: (-strides[i], x.shape[i] == 1))
    numbers = torch.randn([shape[i] for i in order], generator=draw, device=x.device).to(x.dtype)
    return numbers.permute([order.index(i) for i in range(x.ndim)])
