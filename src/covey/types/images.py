"""The images of a prompt, as a processor of transformers prepared them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptImages:
    """Model inputs for the n images of one prompt, stored once a prompt for any number of completions.

    Example: `PromptImages(tensors={"pixel_values": zeros(88, 96), "image_grid_thw": tensor([[1, 6, 8], [1, 4, 10]])}, count=2)`.
    """

    tensors: Mapping[str, Tensor]
    """Outputs of the processor for the images, in their order: `pixel_values` and, by model, grids, sizes or pixel masks."""
    token_types: Mapping[str, Tensor] = field(default_factory=dict)
    """[L] each, which kind of token each of the prompt's ids is (`token_type_ids`, `mm_token_type_ids`), by the model's name for it."""
    count: int = 1
    """n"""
    previews: tuple[bytes, ...] = ()
    """Thumbnails: each image as a small PNG or JPEG file, for people."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """File names of the previews, by their content."""
        return tuple(
            f"{hashlib.sha256(preview).hexdigest()[:24]}.{'png' if preview[:4] == PNG else 'jpg'}"
            for preview in self.previews
        )


PNG = b"\x89PNG"
