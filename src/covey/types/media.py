"""The images, sounds and videos of a prompt, as a processor of transformers prepared them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

_BEGINNINGS = {".png": b"\x89PNG", ".jpg": b"\xff\xd8\xff", ".wav": b"RIFF", ".gif": b"GIF8"}
"""First bytes of the files of previews."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Media:
    """Model inputs for the n images, sounds and videos of one prompt, stored once a prompt for any number of completions.

    Example: `Media(tensors={"pixel_values": zeros(88, 96), "image_grid_thw": tensor([[1, 6, 8], [1, 4, 10]])}, count=2)`.
    """

    tensors: Mapping[str, Tensor]
    """Outputs of the processor for the items, in their order: `pixel_values`, `input_features` and, by model, grids, sizes or masks."""
    token_types: Mapping[str, Tensor] = field(default_factory=dict)
    """[L] each, which kind of token each of the prompt's ids is (`token_type_ids`, `mm_token_type_ids`), by the model's name for it."""
    count: int = 1
    """n"""
    digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of the content of each image, sound and video, by kind in the order of their places."""
    previews: tuple[bytes, ...] = ()
    """Small files for people: PNG or JPEG of an image, WAV of a sound, GIF of a video."""

    def begins(self, other: Media | None) -> bool:
        """True if the images, sounds and videos of `other` begin with these."""
        return other is not None and all(
            other.digests.get(kind, ())[: len(digests)] == digests for kind, digests in self.digests.items()
        )

    def first(self, count: int) -> Media:
        """The same for the first `count` tokens, where all of the media are; tensors that are parts of larger ones are copied."""
        copied = lambda x: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
        kinds = {name: kinds[:count] for name, kinds in self.token_types.items()}
        return replace(self, tensors={name: copied(x) for name, x in self.tensors.items()}, token_types=kinds)

    def over(self, before: Sequence[int], now: Sequence[int]) -> Media:
        """The same for the tokens `now`, each of the type that it has among `before`, those of these media; else it is text."""
        types = dict[str, Tensor]()
        for name, kinds in self.token_types.items():
            kind_of = dict(zip(before, kinds.tolist(), strict=True))
            types[name] = torch.tensor([kind_of.get(token, 0) for token in now], dtype=kinds.dtype)
        return replace(self, token_types=types)

    def last(self, count: int) -> Media:
        """The same for the last `count` tokens, where all of the media are."""
        kinds = {name: kinds[len(kinds) - count :] for name, kinds in self.token_types.items()}
        return replace(self, token_types=kinds)

    def behind(self, before: Media | None, count: int) -> Media:
        """As one with those `before` them, among the first `count` tokens; these media are among the tokens behind.

        The tensors of both are shared, as `Joined`.
        """
        parts = (self,) if before is None else (before, self)
        kinds = dict[str, Tensor]()
        for name, theirs in self.token_types.items():
            first = theirs[:0] if before is None else before.token_types.get(name)
            if first is not None:  # text since has no kind
                kinds[name] = torch.cat([first, theirs.new_zeros(count - len(first)), theirs])
        return Media(
            tensors=together(parts),
            token_types=kinds,
            count=sum(media.count for media in parts),
            digests={
                kind: tuple(digest for media in parts for digest in media.digests.get(kind, ()))
                for kind in dict.fromkeys(kind for media in parts for kind in media.digests)
            },
            previews=tuple(preview for media in parts for preview in media.previews),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """File names of the previews, by their content."""
        suffix = lambda preview: next((end for end, begin in _BEGINNINGS.items() if preview.startswith(begin)), ".jpg")
        return tuple(f"{hashlib.sha256(preview).hexdigest()[:24]}{suffix(preview)}" for preview in self.previews)


@dataclass(frozen=True, eq=False)
class Joined(Mapping[str, Tensor]):
    """Tensors of several media by name, joined each time they are read: completions of a group share those of their prompt."""

    parts: tuple[Mapping[str, Tensor], ...]

    def __getitem__(self, name: str) -> Tensor:
        tensors = [part[name] for part in self.parts if name in part]
        if not tensors:
            raise KeyError(name)
        return tensors[0] if len(tensors) == 1 else joined(tensors)

    def __contains__(self, name: object) -> bool:
        return any(name in part for part in self.parts)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for part in self.parts for name in part))

    def __len__(self) -> int:
        return len(list(iter(self)))


def together(media: Sequence[Media]) -> Mapping[str, Tensor]:
    """Tensors of several media by name, as one."""
    parts = [each.parts if isinstance(each, Joined) else (each,) for each in (entry.tensors for entry in media)]
    return Joined(tuple(itertools.chain(*parts)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Along dimension 0, each padded with zeros to the largest in every other dimension."""
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    sizes = [max(part.shape[d] for part in parts) for d in range(1, parts[0].ndim)]
    pads = lambda part: [n for d in reversed(range(1, part.ndim)) for n in (0, sizes[d - 1] - part.shape[d])]
    return torch.cat([torch.nn.functional.pad(part, pads(part)) for part in parts])
