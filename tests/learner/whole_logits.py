"""Groups whose loss is computed from whole logits."""

from dataclasses import replace

import torch

from kit import group


def groups(count=2, length=24):
    """Groups of 3 completions of `length` bytes each, with advantages of both signs."""
    drawn = [group([letter * length for letter in "xyz"], uid=str(i), question="why" * (i + 1)) for i in range(count)]
    return [replace(one, advantages=torch.tensor([1.0, -0.5, -0.5])) for one in drawn]
