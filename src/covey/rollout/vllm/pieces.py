"""Pieces of a model's weights, each sent whole or not at all: which of them have changed since they were written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path

import torch
from torch import Tensor

from covey.rollout.vllm.worker.covey_worker import block_of, digest_of

_NUMBERS = count(1)
_CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class Piece:
    """One attention, feed-forward or norm of a layer, or a module outside the layers. Servers fuse matrices within it."""

    number: int
    """Pieces with equal numbers have equal bits."""
    num_bytes: int
    sums: Mapping[str, int]
    """Sums of the digest by block; empty where nothing compares them."""
    file: Path | None = None
    """Safetensors file of its tensors; None: they are in memory."""
    tensors: Mapping[str, Tensor] | None = None

    @staticmethod
    def of(tensors: Mapping[str, Tensor], file: Path | None, has_digests: bool) -> Piece:
        """A piece with a new number. Without a file it holds a copy of the tensors."""
        sums: dict[str, int] = {}
        for name, weight in tensors.items() if has_digests else ():
            add_digest(sums, name, weight)
        held = None if file is not None else {name: weight.clone() for name, weight in tensors.items()}
        return Piece(next(_NUMBERS), sum(weight.nbytes for weight in tensors.values()), sums, file, held)

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """True if it has exactly these tensors, bit for bit. A file that cannot be read holds nothing."""
        from safetensors import SafetensorError, safe_open

        if self.tensors is not None:
            return self.tensors.keys() == tensors.keys() and all(
                _is_same(self.tensors[name], weight) for name, weight in tensors.items()
            )
        assert self.file is not None
        try:
            with safe_open(self.file, framework="pt") as opened:
                return set(opened.keys()) == tensors.keys() and all(
                    _is_same(opened.get_tensor(name), weight) for name, weight in tensors.items()
                )
        except (OSError, SafetensorError):
            return False


def _is_same(a: Tensor, b: Tensor) -> bool:
    """True if both have the same type, shape and bits. The first chunk decides for nearly all tensors that were trained."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = (tensor.reshape(-1).view(torch.uint8) for tensor in (a, b))
    return all(torch.equal(x[i : i + _CHUNK], y[i : i + _CHUNK]) for i in range(0, len(x), _CHUNK))


def in_pieces(
    weights: Iterable[tuple[str, Tensor]], *, on_host: bool = True
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors, a piece at a time, under a key each. A piece whose tensors lie apart comes in several parts."""
    seen: dict[str, int] = {}
    for place, part in groupby(weights, lambda pair: _place_of(pair[0])):
        seen[place] = seen.get(place, 0) + 1
        yield (
            f"{place} {seen[place]}",
            {name: (weight.cpu() if on_host else weight).contiguous() for name, weight in part},
        )


def _place_of(name: str) -> str:
    within_layer = re.match(r"(?:.*?\.)?\d+\.\w+", name)
    return within_layer.group() if within_layer else name.rpartition(".")[0]


def largest_piece(weights: Iterable[tuple[str, Tensor]]) -> int:
    """Number of values in the largest piece, about: adapters and tied weights count too."""
    sizes: dict[str, int] = {}
    for name, weight in weights:
        sizes[_place_of(name)] = sizes.get(_place_of(name), 0) + count_of(weight)
    return max(sizes.values(), default=0)


def count_of(weight: Tensor) -> int:
    """Number of values of a weight, at most two a byte where it is packed."""
    return weight.numel() if weight.is_floating_point() else 2 * weight.nbytes


def changed_pieces(pieces: Mapping[str, Piece], held: Mapping[str, int]) -> list[Piece]:
    """Pieces whose numbers differ from those that a server holds, with all parts of each."""
    places = {key.split()[0] for key, piece in pieces.items() if held.get(key) != piece.number}
    return [piece for key, piece in pieces.items() if key.split()[0] in places]


def add_digest(sums: dict[str, int], name: str, weight: Tensor) -> None:
    """Add the digest of a weight to that of its block."""
    block = block_of(name)
    sums[block] = (sums.get(block, 0) + digest_of(weight)) % 2**64
