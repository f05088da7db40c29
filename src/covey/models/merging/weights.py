"""Weights in safetensors files, one tensor at a time: read from one file or several, written in order."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from covey.errors import ModelError

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}
Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
SHARD_BYTES = 5 * 10**9
"""Largest file that is written, as transformers' default."""


class Weights:
    """The tensors of a model folder by name. Raises ModelError for a folder without safetensors, or with damaged ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = sorted(folder.glob("model*.safetensors"))  # a checkpoint holds the optimizer's state too
        if not files:
            raise ModelError(f"{folder} has no model*.safetensors; save the model with transformers' save_pretrained.")
        self._place: dict[str, tuple[Path, tuple[int, ...], torch.dtype]] = {}
        try:
            for file in files:
                with safe_open(str(file), framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                        entry = opened.get_slice(name)
                        self._add(name, file, tuple(entry.get_shape()), entry.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{folder} has a safetensors file that cannot be read ({error}); copy it again."
            ) from error

    def _add(self, name: str, file: Path, shape: tuple[int, ...], stored: str) -> None:
        if stored not in _NAMES:
            raise ModelError(
                f"{file} holds {name} as {stored}, which cannot be merged; give a model that is not quantized."
            )
        if name in self._place:
            raise ModelError(
                f"{name} is in {self._place[name][0]} and in {file.name}; remove the files that are not this model's."
            )
        self._place[name] = file, shape, _NAMES[stored]

    @property
    def names(self) -> list[str]:
        return sorted(self._place)

    def leave_out(self, name: str) -> None:
        """Forget a tensor."""
        del self._place[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place[name][1]

    def dtype(self, name: str) -> torch.dtype:
        return self._place[name][2]

    def __getitem__(self, name: str) -> Tensor:
        # opened for each tensor: an open file is a memory mapping, whose pages stay in memory once they were read
        with safe_open(str(self._place[name][0]), framework="pt", device="cpu") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor


def write(folder: Path, described: Described, tensors: Iterable[Tensor]) -> int:
    """Write `tensors`, in the order of `described` (dtype and shape by name), as a transformers model's weights.

    One tensor is in memory at a time; files hold at most SHARD_BYTES. Returns the bytes of all tensors.
    """
    shards = _shards(described)
    index: dict[str, str] = {}
    remaining = iter(tensors)
    for number, names in enumerate(shards):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, {name: described[name] for name in names}, remaining)
        index |= dict.fromkeys(names, file)
    total = sum(map(_bytes, described.values()))
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)
    return total


def _shards(described: Described) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in described.items():
        if shards[-1] and size + _bytes(spec) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(spec)
    return shards


def _bytes(described: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = described
    return dtype.itemsize * torch.Size(shape).numel()


def _write_file(file: Path, described: Described, tensors: Any) -> None:
    """One safetensors file: 8 bytes of length, a JSON header, the tensors' bytes (<https://github.com/huggingface/safetensors>)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, spec in described.items():
        header[name] = {"dtype": _DTYPES[spec[0]], "shape": list(spec[1]), "data_offsets": [at, at + _bytes(spec)]}
        at += _bytes(spec)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for dtype, shape in described.values():
            tensor = next(tensors).to(dtype).contiguous()
            assert tuple(tensor.shape) == tuple(shape)
            flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            out.write(flat.data)
