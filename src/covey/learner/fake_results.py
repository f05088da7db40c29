"""Results of operations on fake tensors, of which a step makes most again and again with the same shapes.

PyTorch's own cache (`FakeTensorMode.cache`) takes about half a millisecond to find one.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten


class _UnlikeError(Exception):
    """An argument or a result by which no operation is recognized."""


_Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
"""Shape, stride, storage offset, type and device of a tensor."""


@dataclass(frozen=True)
class _Output:
    """Recipe of a result's tensor: an argument itself, a view of it, or a tensor of its own."""

    source: int | None
    """Number of the tensor argument whose storage it has; None: its own."""
    is_argument: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Result:
    outputs: tuple[_Output | None, ...]
    structure: Any
    seconds: float


@functools.cache
def _results_on(device: Hashable) -> dict[Hashable, _Result]:
    """Results by key, for all modes of the process: its models are alike but for their number of layers."""
    return {}


class FakeResults:
    """Calls `compute(func, args, kwargs)` for operations on a mode's fake tensors, once for each combination of shapes.

    `cost(func, args, kwargs, result)` gives the seconds of an operation on `device`.
    """

    def __init__(
        self,
        fakes: FakeTensorMode,
        compute: Callable[[Any, Any, dict[str, Any]], Any],
        cost: Callable[[Any, Any, dict[str, Any], Any], float],
        device: Hashable = None,
    ) -> None:
        self.fakes = fakes
        self._compute = compute
        self.cost = cost
        self._results = _results_on(device)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, float]:
        """The result of an operation and its seconds."""
        tensors: list[FakeTensor] = []
        try:
            key = self._key(func, args, kwargs, tensors)
        except _UnlikeError:
            result = self._compute(func, args, kwargs)
            return result, self.cost(func, args, kwargs, result)
        made = self._results.get(key)
        if made is None:
            result = self._compute(func, args, kwargs)
            seconds = self.cost(func, args, kwargs, result)
            if key == self._key(func, args, kwargs, []):  # no argument took another shape in place
                self._remember(key, tensors, result, seconds)
            return result, seconds
        values = [None if output is None else self._tensor(output, tensors) for output in made.outputs]
        return values[0] if made.structure is None else tree_unflatten(values, made.structure), made.seconds

    def _key(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[FakeTensor]) -> Hashable:
        """Key of all that the result depends on; lists the tensors among the arguments."""
        described = [self._described(arg, tensors) for arg in args]
        for name, value in kwargs.items():
            described += [name, self._described(value, tensors)]
        if not tensors:
            raise _UnlikeError
        return func, torch.get_default_dtype(), *described

    def _described(self, value: Any, tensors: list[FakeTensor]) -> Hashable:
        if isinstance(value, FakeTensor):
            tensors.append(value)
            return self._layout(value)
        if isinstance(value, Tensor):
            raise _UnlikeError  # a result may depend on its numbers
        if isinstance(value, (list, tuple)):
            return tuple([self._described(item, tensors) for item in value])
        return type(value), value  # 1, 1.0 and True are equal

    def _layout(self, tensor: FakeTensor) -> _Layout:
        is_plain = tensor.layout is torch.strided and not tensor.dtype.is_complex and tensor.constant is None
        if not is_plain or tensor.fake_mode is not self.fakes:
            raise _UnlikeError
        return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device

    def _remember(self, key: Hashable, tensors: list[FakeTensor], result: Any, seconds: float) -> None:
        leaves, structure = ([result], None) if isinstance(result, FakeTensor) else tree_flatten(result)
        places = dict[int, int]()
        for place, tensor in enumerate(tensors):
            places.setdefault(tensor.untyped_storage()._cdata, place)
        try:
            outputs = [None if leaf is None else self._output(leaf, tensors, places) for leaf in leaves]
        except _UnlikeError:
            return
        self._results[key] = _Result(tuple(outputs), structure, seconds)

    def _output(self, leaf: Any, tensors: list[FakeTensor], places: dict[int, int]) -> _Output:
        if not isinstance(leaf, FakeTensor) or leaf.requires_grad:
            raise _UnlikeError
        layout, storage = self._layout(leaf), leaf.untyped_storage()
        same = [place for place, tensor in enumerate(tensors) if tensor is leaf]
        source = same[0] if same else places.get(storage._cdata)
        output = _Output(source, bool(same), *layout)
        if source is None and self._tensor(output, tensors).untyped_storage().nbytes() != storage.nbytes():
            raise _UnlikeError  # a view of a storage that no argument has
        return output

    def _tensor(self, output: _Output, tensors: list[FakeTensor]) -> Tensor:
        if output.is_argument:
            assert output.source is not None
            return tensors[output.source]
        with torch._C._DisableTorchDispatch():  # a mode would make it fake
            if output.source is None:
                empty = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
            else:
                empty = torch.empty(0, dtype=output.dtype, device="meta")
                empty.set_(tensors[output.source].untyped_storage(), output.offset, output.shape, output.stride)
        return FakeTensor(self.fakes, empty, output.device)
