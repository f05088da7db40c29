"""Bytes of live tensors, counted at every PyTorch operation, for real and for fake tensors (shapes without storage)."""

import math
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.learner.fake_results import FakeResults

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the storages allocated inside it until they are freed.

    `torch.distributed._tools.mem_tracker.MemTracker` does the same by module and refuses a module that is called twice, as a
    learner calls its model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes of live storages."""
        self.peak = 0
        """Maximum of `now` since the last `begin`."""
        self.total = 0  # with those that were freed
        self.seconds = 0.0
        """Estimated seconds of the operations on another device; counted by subclasses that model one."""
        self._freed_by: dict[int, weakref.finalize[Any, Any]] = {}

    def begin(self) -> None:
        """Reset `peak`."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.compute(func, args, kwargs or {})
        for tensor in _tensors(result):
            self._count(tensor.untyped_storage(), args)
        self.peak = max(self.peak, self.now)
        return result

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Result of the operation."""
        return func(*args, **kwargs)

    def _count(self, storage: torch.UntypedStorage, inputs: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        # a view of a weight from before is no new storage
        if key not in self._freed_by and all(x.untyped_storage()._cdata != key for x in _tensors(inputs)):
            self._freed_by[key] = weakref.finalize(storage, self._forget, key, size)
            self.now += size
            self.total += size

    def _forget(self, key: int, size: int) -> None:
        del self._freed_by[key]
        self.now -= size


def _tensors(values: Any) -> list[Tensor]:
    """Tensors with a storage: a sparse one has none, and its indices and values are tensors of their own."""
    leaves = (values,) if isinstance(values, Tensor) else tree_leaves(values)
    return [x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided]


class FakeBytes(LiveBytes):
    """`LiveBytes` for a model of fake tensors, of which only shapes are computed.

    Results without a fake input are real, such as the token ids of a batch. A number read from a fake tensor is 0, a boolean is
    true, so losses and norms are finite and comparisons of two implementations hold. A fake mask selects everything. `device`
    names what `cost` depends on.
    """

    def __init__(self, device: Hashable = None) -> None:
        super().__init__()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        """Mode to enter while creating the model."""
        self.products: set[tuple[Any, ...]] = set()
        """Shapes of the matmuls computed so far."""
        self._results = FakeResults(self.fakes, _computed, self.cost, device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # twice as frequent as operations, and creates no tensor
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _READ and any(isinstance(arg, FakeTensor) for arg in args):
            result = _READ[func](args[0])
            self.seconds += self.cost(func, args, kwargs, result)
            return result
        if func in _PRODUCTS:
            self.products.add(tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor)))
        result, seconds = self._results.compute(func, args, kwargs)
        self.seconds += seconds
        return result

    def cost(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
        """Seconds of the operation on another device."""
        return 0.0


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func in _INDEXED:
        args = (args[0], _places(args[1]), *args[2:])
    return func(*args, **kwargs)


def _number(x: Tensor) -> Any:
    return True if x.dtype == torch.bool else 0.0 if x.dtype.is_floating_point else 0


_DEVICE = torch.ops.prim.device.default
_READ = {
    aten._local_scalar_dense.default: _number,
    aten.equal.default: lambda x: True,
    aten.allclose.default: lambda x: True,
    aten.nonzero.default: lambda x: x.new_zeros((x.numel(), x.ndim), dtype=torch.long),
}
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.linear.default, aten.bmm.default)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with every mask replaced by index tensors: the number of selected elements of a fake mask is unknown."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            expanded.append(index)
        elif isinstance(index, FakeTensor):
            expanded += [index.new_zeros(math.prod(index.shape), dtype=torch.long)] * index.ndim
        else:
            expanded += index.nonzero().unbind(-1)
    return expanded


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors' storages, each counted once."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
