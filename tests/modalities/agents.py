"""Models for agents with images and sounds, and the parts of messages that carry them."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch

from modalities.acting_models import acting_model


def png(image: Any) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    content = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def ending(kind: str) -> tuple[Any, Any]:
    """A model of random weights that ends its turns after a few tokens, and its processor."""
    model, processor = acting_model(kind)
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.weight.shape[0]))
        model.lm_head.bias[processor.tokenizer.eos_token_id] = 6.0
    return model, processor
