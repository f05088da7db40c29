"""A second device with real numbers, made in Python: its tensors are CPU tensors behind another device's name.

torch's registration of a backend in Python gives it a device guard and autograd. `SecondDevice` computes each operation on the CPU
and keeps a GPU's rules: a tensor of the CPU (but for one number) beside one of the device is an error, and whatever makes the host
wait for the device is recorded with the line that asked for it. Registration holds for the whole process, so that tests run it in
a process of their own.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME = "second"
LIBRARY = str(Path(__file__).parents[1] / "src" / "covey")
aten = torch.ops.aten
_SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
}
"""Operations whose result has a size that depends on values: the host waits for it."""
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.allclose.default}
_MOVES = {aten._to_copy.default, aten.copy_.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class _Module:
    """`torch.second`: what torch asks a backend for."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


FLOAT64 = {"refused": False}
"""Whether a float64 tensor on the device is an error, as on MPS."""


def register() -> torch.device:
    """Make the device known to this process."""
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    for name in (
        "empty.memory_format",
        "empty_strided",
    ):  # `torch.tensor(..., device=...)` reaches these outside of any mode
        _LIBRARY.impl(name, _maker(getattr(torch, name.partition(".")[0])), "PrivateUse1")
    _LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    return torch.device(NAME, 0)


WAITS: Counter[str] = Counter()
"""What made the host wait for the device since it was cleared."""
_LIBRARY = torch.library.Library("aten", "IMPL")


def _maker(make: Any) -> Any:
    return lambda *args, device=None, pin_memory=None, layout=None, **kwargs: OnDevice(make(*args, **kwargs))


class OnDevice(torch.Tensor):
    """A tensor of the second device; `raw` is its content on the CPU."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> OnDevice:
        if FLOAT64["refused"] and raw.dtype == torch.float64:
            raise TypeError(f"this device has no float64: {place('')}")
        found: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        found.raw = raw
        return found

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _copy_from(source: Any, into: Any, non_blocking: bool = False) -> Any:
    if not non_blocking:
        WAITS[place("between the devices")] += 1
    raw = [x.raw if isinstance(x, OnDevice) else x for x in (source, into)]
    raw[1].copy_(raw[0])
    return into


def is_second(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


class SecondDevice(TorchDispatchMode):
    """Inside, tensors may be made on the device; `WAITS` counts what makes the host wait, by the line of Covey's or transformers' code."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation by a GPU's rules."""
    given = _tensors(args) + _tensors(kwargs.values()) if kwargs else _tensors(args)
    here = [x for x in given if isinstance(x, OnDevice)]
    asked = kwargs.get("device")
    if not here and not is_second(asked):
        return func(*args, **kwargs)
    kwargs = {**kwargs, "device": torch.device("cpu")} if is_second(asked) else kwargs
    if func in _MOVES:
        return _move(func, args, kwargs, asked)
    if here:
        _expect_one_device(func, given)
        _note(func, args)
    out = func(*map(_raw, args), **{name: _raw(x) for name, x in kwargs.items()})
    if func in _READS:
        return out
    wrapped = _wrapped(out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if here else wrapped


def _tensors(values: Any) -> list[torch.Tensor]:
    """Those among an operation's arguments: each a tensor, a list that may hold some, or none. Torch's own trees are 3x slower."""
    found = []
    for x in values:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [y for y in x if isinstance(y, torch.Tensor)]
    return found


def _raw(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)([y.raw if isinstance(y, OnDevice) else y for y in x])
    return x.raw if isinstance(x, OnDevice) else x


def _wrapped(out: Any) -> Any:
    if isinstance(out, (list, tuple)):
        return type(out)([OnDevice(x) if isinstance(x, torch.Tensor) else x for x in out])
    return OnDevice(out) if isinstance(out, torch.Tensor) else out


def _move(func: Any, args: Any, kwargs: dict[str, Any], asked: Any) -> Any:
    """Copies. Between the devices they wait for all that was begun, unless `non_blocking`; to the CPU they always count."""
    source = args[1] if func is aten.copy_.default else args[0]
    is_here = isinstance(source, OnDevice)
    if func is aten.copy_.default:
        goes_here, is_free = isinstance(args[0], OnDevice), (args[2] if len(args) > 2 else False)
    else:
        goes_here, is_free = (is_here if asked is None else is_second(asked)), kwargs.get("non_blocking", False)
    if is_here != goes_here and not (is_free and goes_here) and not (source.ndim == 0 and goes_here):
        WAITS[place("to the device" if goes_here else "to the CPU")] += 1
    raw = source.raw if is_here else source
    if func is aten.copy_.default:
        (args[0].raw if goes_here else args[0]).copy_(raw)
        return args[0]
    found = func(raw, **kwargs)
    return OnDevice(found) if goes_here else found


def _expect_one_device(func: Any, given: list[torch.Tensor]) -> None:
    """A CPU tensor of one number may stand beside tensors of the device, and CPU indices may index one (which waits)."""
    strangers = [x for x in given if not isinstance(x, OnDevice) and x.ndim > 0]
    if strangers and func not in _INDEXED:
        shapes = [tuple(x.shape) for x in strangers]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got {shapes} on the CPU: {place('')}"
        )


def _note(func: Any, args: Any) -> None:
    if func in _READS or func in _SIZED_BY_VALUES:
        WAITS[place(func._schema.name.removeprefix("aten::"))] += 1
    elif func in _INDEXED:
        indices = [x for x in args[1] if x is not None]
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            WAITS[place("index by a mask")] += 1
        if any(not isinstance(x, OnDevice) and x.ndim > 0 for x in indices):
            WAITS[place("index from the CPU")] += 1


def place(said: str) -> str:
    """`said` at the innermost line of Covey's, else of transformers' code: `file.py:function said`."""
    frame: Any = sys._getframe(1)
    outside = ""
    while frame is not None:
        name = frame.f_code.co_filename
        at = f"{name.rsplit('/', 1)[-1]}:{frame.f_code.co_name} {said}".strip()
        if name.startswith(LIBRARY):
            return at
        if "/transformers/" in name and not outside:
            outside = at
        frame = frame.f_back
    return outside or said


def to_second(model: nn.Module) -> nn.Module:
    """Move parameters and buffers in place; shared ones stay shared."""
    made: dict[int, Any] = {}

    def moved(x: torch.Tensor) -> Any:
        if id(x) not in made:
            on = x.detach() if isinstance(x.data, OnDevice) else OnDevice(x.detach())
            made[id(x)] = nn.Parameter(on, x.requires_grad) if isinstance(x, nn.Parameter) else on
        return made[id(x)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: moved(x) for name, x in held.items() if x is not None})
    return model
