"""Rotary embeddings of transformers' model files (Su et al. 2021, RoPE), recognised by their numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from covey.errors import RAW_ERRORS
from covey.kernels.norms import agree

ROTATION = "apply_rotary_pos_emb"
"""Name of the function that transformers' model files call to rotate queries and keys."""


class Rotation(NamedTuple):
    """Partners are neighbours with `pairs`, else a half apart; tables have an entry a partner with `by_pair`, else a number."""

    pairs: bool
    by_pair: bool
    takes_two: bool = True
    """False: the function rotates one tensor, not queries and keys."""


KINDS = tuple(Rotation(pairs, by_pair) for pairs in (False, True) for by_pair in (False, True))


def rotated(*args: Any) -> tuple[Tensor, ...]:
    """Rotary embedding of each of `xs` [B, H, S, D] in `dtype`, computed in float32; numbers beyond those that turn are copied.

    `args`: `*xs, cosines, sines, dtype, pairs, by_pair`; tables are [B, S, T].
    """
    *xs, cosines, sines, dtype, pairs, by_pair = args
    cosines, sines = (_by_number(table, pairs, by_pair) for table in (cosines, sines))
    return tuple(_turn(x, cosines, sines, pairs).to(dtype) for x in xs)


def rotated_backward(*args: Any) -> tuple[Any, ...]:
    """Gradients of `xs`, by those of the outputs: the turn back. Tables have none."""
    count = (len(args) - 5) // 2
    gradients, xs, (cosines, sines, _, pairs, by_pair) = args[:count], args[count : 2 * count], args[2 * count :]
    cosines, sines = (_by_number(table, pairs, by_pair) for table in (cosines, sines))
    turned = (_turn(of_x, cosines, sines, pairs, back=True).to(x.dtype) for of_x, x in zip(gradients, xs, strict=True))
    return *turned, None, None


def _by_number(table: Tensor, pairs: bool, by_pair: bool) -> Tensor:
    """[B, 1, S, T] float32 with an entry for each number that turns."""
    table = table[:, None].float()
    if not by_pair:
        return table
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) if pairs else torch.cat([table, table], -1)


def _turn(x: Tensor, cosines: Tensor, sines: Tensor, pairs: bool, *, back: bool = False) -> Tensor:
    width = cosines.shape[-1]
    wide = x[..., :width].float()
    out = wide * cosines - _partner(wide * sines, pairs) if back else wide * cosines + _partner(wide, pairs) * sines
    return out if width == x.shape[-1] else torch.cat([out, x[..., width:].float()], -1)


def _partner(x: Tensor, pairs: bool) -> Tensor:
    """The other number of each pair, negative in the place of the first: a quarter of a turn."""
    if pairs:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def homes_of(modules: Iterable[nn.Module]) -> Iterator[ModuleType]:
    """The Python modules of these modules' classes, each once; those that Python does not list (of code that was executed) are left out."""
    return filter(None, dict.fromkeys(sys.modules.get(type(module).__module__) for module in modules))


def replace_rotations(decoder: nn.Module, wrapper: Callable[..., Any], *more: Any) -> int:
    """Put `partial(wrapper, function, kind, *more)` in place of the rotations of the files of this decoder's modules. Returns their number."""
    count = 0
    for home in homes_of(decoder.modules()):
        function = without_rotation(getattr(home, ROTATION, None), wrapper)
        kind = None if function is None or not home.__name__.startswith("transformers.") else recognised(function)
        if kind is not None:
            setattr(home, ROTATION, partial(wrapper, function, kind, *more))
            count += 1
    return count


def without_rotation(function: Any, wrapper: Callable[..., Any]) -> Any:
    """A file's rotation without what `wrapper` put before it; that of others stays."""
    if not isinstance(function, partial) or not function.args:
        return function
    inner = without_rotation(function.args[0], wrapper)
    return inner if function.func is wrapper else partial(function.func, inner, *function.args[1:], **function.keywords)


def recognised(function: Callable[..., Any]) -> Rotation | None:
    """The formula that a function computes, for tables as wide as the heads, narrower, or half as wide; None for another."""
    kinds = (kind._replace(takes_two=takes_two) for takes_two in (True, False) for kind in KINDS)
    return next((kind for kind in kinds if _computes(function, kind)), None)


def _computes(function: Callable[..., Any], kind: Rotation) -> bool:
    query, key = torch.randn(1, 2, 3, 16, device="cpu"), torch.randn(1, 1, 3, 16, device="cpu")
    xs, agreed = (query, key) if kind.takes_two else (query,), False
    for width in (16, 8):
        angles = torch.randn(1, 3, width // 2, device="cpu")
        tables = [torch.cat([x, x], -1) if kind.pairs and kind.by_pair else x for x in (angles.cos(), angles.sin())]
        if not kind.by_pair:
            tables = list(torch.randn(2, 1, 3, width, device="cpu"))
        try:
            out = function(*xs, *tables)
            want = rotated(*xs, *tables, query.dtype, kind.pairs, kind.by_pair)
            out = out if kind.takes_two else (out,)
            if len(out) != len(xs) or not all(map(agree, want, out)):
                return False
        except RAW_ERRORS:
            return agreed  # without numbers that do not turn
        agreed = True
    return agreed


def heads_of(kind: Rotation, args: Sequence[Any], others: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
    """Tensors that a call rotates, as [B, H, S, D]; None for a call of another form than `(*xs, cosines, sines)` with `unsqueeze_dim` 1 or 2."""
    count, place = 1 + kind.takes_two, others.get("unsqueeze_dim", 1)
    if len(args) != count + 2 or set(others) - {"unsqueeze_dim"} or place not in (1, 2):
        return None
    if not all(isinstance(x, Tensor) for x in args) or any(x.ndim != 4 for x in args[:count]) or args[count].ndim != 3:
        return None
    return tuple(x if place == 1 else x.transpose(1, 2) for x in args[:count])


def as_called(kind: Rotation, xs: Iterable[Tensor], others: Mapping[str, Any]) -> Any:
    """The rotated heads in the form that the function returns."""
    xs = [x if others.get("unsqueeze_dim", 1) == 1 else x.transpose(1, 2) for x in xs]
    return tuple(xs) if kind.takes_two else xs[0]
