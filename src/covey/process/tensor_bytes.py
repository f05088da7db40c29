"""Python objects as one buffer of bytes whose tensors are copied, not pickled: pickling a small tensor takes longer than sending it."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16
"""Alignment of tensors in bytes: `view` requires a multiple of the element size."""
_SIZE = 8
"""Size in bytes of the header, which holds the length of the pickle."""


class _Pickler(pickle.Pickler):
    """Leaves plain tensors out of the pickle: their type, shape and place in the buffer stay in it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.end = 0
        self._read: dict[int, tuple[int, torch.dtype, tuple[int, ...]]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized or obj.requires_grad:
            return None  # pickled as torch does it
        if id(obj) not in self._read:
            self._read[id(obj)] = (self.end, obj.dtype, tuple(obj.shape))
            self.tensors.append(obj)  # the reference also keeps its id from being reused
            self.end += _align(obj.nbytes)
        return self._read[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, data: Tensor) -> None:
        super().__init__(file)
        self.data = data
        self._read: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        start, dtype, shape = pid
        count = torch.Size(shape).numel() * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        if start not in self._read:
            content = self.data[start : start + count].clone()  # a view would keep the whole buffer alive
            self._read[start] = content.view(dtype).view(shape)
        return self._read[start]


def to_bytes(items: Any) -> Tensor:
    """[n] uint8 on the CPU: the length of the pickle, the pickle, the tensors' contents. Any object that pickle takes."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(items)
    pickled = file.getbuffer()
    first = _align(_SIZE + len(pickled))
    out = torch.zeros(first + pickler.end, dtype=torch.uint8)
    out[:_SIZE].view(torch.int64).fill_(len(pickled))
    out[_SIZE : _SIZE + len(pickled)] = torch.frombuffer(pickled, dtype=torch.uint8)
    for tensor in pickler.tensors:
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        out[first : first + content.numel()] = content
        first += _align(content.numel())
    return out


def from_bytes(data: Tensor) -> Any:
    """The objects of `to_bytes`; [n] uint8 on the CPU, possibly padded at the end. Tensors are on the CPU."""
    size = int(data[:_SIZE].view(torch.int64))
    pickled = io.BytesIO(data[_SIZE : _SIZE + size].numpy().tobytes())
    return _Unpickler(pickled, data[_align(_SIZE + size) :]).load()


def _align(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
