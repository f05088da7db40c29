"""Norms and rotary embeddings of a model's own modules in one Triton kernel each, for a sampler's passes on a GPU.

The modules stay transformers' own; what lies between their products takes one launch in place of five to ten. A module or function
is recognised by comparing its output with the formula on random inputs; others are not changed. Numbers are those of `fused_layers`,
by which the learner computes: float32 inside, rounded once.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.errors import RAW_ERRORS
from covey.kernels.fused_layers import ROTATION, homes_of, is_fused, without_rotation
from covey.kernels.norms import Norm, agree, recognised_norm, weight_of
from covey.kernels.triton_decode import TritonDecode
from covey.models import computing, decoder_of

Run = Callable[[], Tensor]
"""Forward pass of a few tokens by the modules as they are; returns the logits."""

_here = threading.local()  # `steps`: the `StepKernels` whose pass this thread computes


@dataclass(frozen=True)
class _Rotation:
    """Partners are neighbours with `pairs`, else a half apart; tables have an entry a partner with `by_pair`, else a number."""

    pairs: bool
    by_pair: bool

    def __call__(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """The formula by PyTorch's operations: `x` [B, H, S, D], tables [B, S, T]."""
        table = cosines.shape[-1]
        turned = 2 * table if self.by_pair and not self.pairs else table
        at = torch.arange(turned, device=x.device)
        is_first = at % 2 == 0 if self.pairs else at < turned // 2
        step = 1 if self.pairs else turned // 2
        pair = at // 2 if self.pairs else at % (turned // 2)
        partner = x[..., torch.where(is_first, at + step, at - step)].float()
        cosines, sines = (t[:, None, :, pair if self.by_pair else at].float() for t in (cosines, sines))
        rotated = x[..., :turned].float() * cosines + torch.where(is_first, -partner, partner) * sines
        return torch.cat([rotated.to(x.dtype), x[..., turned:]], -1)


ROTATIONS = tuple(_Rotation(pairs, by_pair) for pairs in (False, True) for by_pair in (False, True))


class StepKernels:
    """The recognised norms and rotations of one model, which compute in kernels inside of `computing()`."""

    def __init__(self, model: Any, run: Run) -> None:
        """`run` shows which norms feed products alone: rounding what they return changes no bit of its logits."""
        decoder = decoder_of(model)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            candidates = [module for module in decoder.modules() if is_fused(module.__dict__.get("forward"))]
            kinds = {module: kind for module in candidates if (kind := recognised_norm(module)) is not None}
            self.count = len(kinds) + _prepare_rotations(decoder)
            self.feeding = set(_feeding_products(decoder, kinds, run)) if kinds else set()
        self.norms = {module: partial(_norm, module, kind, module in self.feeding) for module, kind in kinds.items()}
        """Forward of each norm."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which this thread's passes of the model compute in the kernels."""
        with ExitStack() as stack:
            for module, forward in self.norms.items():
                if is_fused(module.__dict__.get("forward")):  # not replaced since
                    stack.enter_context(computing(module, forward))
            before, _here.steps = getattr(_here, "steps", None), self
            try:
                yield
            finally:
                _here.steps = before


def _product_dtype(x: Tensor) -> torch.dtype | None:
    """Type of a product of `x`: autocast's, float32 without; None for 16-bit numbers without autocast, which the modules round."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype if x.dtype == torch.float32 else None


def _norm(module: Any, kind: Norm, feeds_products: bool, /, *args: Any, **others: Any) -> Tensor:
    dtype = _product_dtype(args[0]) if args else None
    if dtype is None or any(value is not None for value in (*args[1:], *others.values())):  # a gate
        plain: Tensor = type(module).forward(module, *args, **others)
        return plain
    made = dtype if feeds_products else args[0].dtype
    return TritonDecode.norm(args[0], weight_of(module), kind.epsilon, kind.offset, made)


def _rotate(plain: Callable[..., Any], kind: _Rotation, takes_two: bool, /, *args: Any, **others: Any) -> Any:
    """Rotary embedding of queries and keys, or of one of them, in the kernel where this thread's pass computes so."""
    xs, tables = args[: 1 + takes_two], args[1 + takes_two :]
    are_heads = len(tables) == 2 and all(isinstance(x, Tensor) and x.ndim == 4 for x in xs)
    place = others.get("unsqueeze_dim", 1)
    is_usual = are_heads and tables[0].ndim == 3 and not set(others) - {"unsqueeze_dim"} and place in (1, 2)
    dtype = _product_dtype(xs[0]) if is_usual and getattr(_here, "steps", None) is not None else None
    if dtype is None:
        return plain(*args, **others)

    def turn(x: Tensor) -> Tensor:
        of_heads = x if place == 1 else x.transpose(1, 2)
        rotated = TritonDecode.rotate(of_heads, tables[0], tables[1], kind.pairs, kind.by_pair, dtype)
        return rotated if place == 1 else rotated.transpose(1, 2)

    return tuple(map(turn, xs)) if takes_two else turn(*xs)


# -- recognising them ---------------------------------------------------------------------------------------------------


def _prepare_rotations(decoder: nn.Module) -> int:
    """Let the rotations of this decoder's files ask for the kernel. Returns their number."""
    count = 0
    for home in homes_of(decoder.modules()):
        function = getattr(home, ROTATION, None)
        if function is None or not home.__name__.startswith("transformers."):
            continue
        plain = without_rotation(function, _rotate)
        for takes_two in (True, False):
            kind = next((kind for kind in ROTATIONS if _rotates(plain, kind, takes_two)), None)
            if kind is not None:
                setattr(home, ROTATION, partial(_rotate, plain, kind, takes_two))
                count += 1
                break
    return count


def _rotates(function: Callable[..., Any], kind: _Rotation, takes_two: bool) -> bool:
    """True if the function is this formula, for tables as wide as the heads, narrower, and half as wide."""
    query, key = torch.randn(1, 2, 3, 16, device="cpu"), torch.randn(1, 1, 3, 16, device="cpu")
    xs, agreed = (query, key) if takes_two else (query,), False
    for width in (16, 8):
        angles = torch.randn(1, 3, width // 2, device="cpu")
        tables = [torch.cat([x, x], -1) if kind.pairs and kind.by_pair else x for x in (angles.cos(), angles.sin())]
        if not kind.by_pair:
            tables = list(torch.randn(2, 1, 3, width, device="cpu"))
        try:
            out = function(*xs, *tables)
            out = out if takes_two else (out,)
            if len(out) != len(xs) or not all(agree(kind(x, *tables), y) for x, y in zip(xs, out, strict=True)):
                return agreed
        except RAW_ERRORS:
            return agreed  # without numbers that do not turn
        agreed = True
    return agreed


def _feeding_products(decoder: nn.Module, norms: Iterable[nn.Module], run: Run) -> Iterator[nn.Module]:
    """Norms whose every reader is a product: rounded to the type of products, they change no bit. Layers alike are tried together."""
    chosen, roles = set(norms), dict[str, list[nn.Module]]()
    for name, module in decoder.named_modules():
        if module in chosen:
            roles.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(module)
    before = run()
    for alike in roles.values():
        with ExitStack() as stack:
            for module in alike:
                stack.enter_context(computing(module, partial(_rounded, module.forward)))
            is_same = torch.equal(run(), before)
        if is_same:
            yield from alike


def _rounded(plain: Callable[..., Tensor], /, *args: Any, **others: Any) -> Tensor:
    dtype, out = _product_dtype(args[0]) if args else None, plain(*args, **others)
    return out if dtype is None else out.to(dtype).to(out.dtype)
