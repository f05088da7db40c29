"""Vectors of texts from any encoder or language model, and how near two texts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.errors import ModelError


@dataclass(frozen=True, eq=False)
class Embedder:
    """Means of the last hidden states over a text's tokens, of length 1. Texts past the model's context are cut, and counted."""

    model: Any
    tokenizer: Any
    max_tokens: int = 512

    @classmethod
    def of(cls, name: str | Path, device: Any = None) -> Embedder:
        """The model in a folder or of a hub id. Raises ModelError where there is none."""
        from transformers import AutoModel, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(name))
            model = AutoModel.from_pretrained(str(name))
        except (OSError, ValueError) as error:
            raise ModelError(f"{str(name)!r} is no model that can embed texts: {error}") from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        limit = getattr(model.config, "max_position_embeddings", None) or cls.max_tokens
        return cls(model.eval().to(device or "cpu"), tokenizer, min(int(limit), cls.max_tokens))

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch_size: int = 32) -> Tensor:
        """[N, H] float32, rows of length 1; zeros for an empty text."""
        vectors = []
        for start in range(0, len(texts), batch_size):
            part = [text or " " for text in texts[start : start + batch_size]]
            batch = self.tokenizer(part, return_tensors="pt", padding=True, truncation=True, max_length=self.max_tokens)
            batch = {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
            hidden = self.model(**batch).last_hidden_state.float()  # [B, T, H]
            mask = batch["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
            empty = torch.tensor([not text for text in texts[start : start + batch_size]], device=mean.device)
            vectors.append(torch.nn.functional.normalize(mean, dim=-1).masked_fill(empty[:, None], 0.0).cpu())
        return torch.cat(vectors) if vectors else torch.empty(0, 0)


def relevance(prompts: Tensor, answers: Tensor) -> list[float]:
    """Cosine of each prompt's vector with its answer's, [N, H] and [N, H] of length 1: 1 the same, 0 unrelated."""
    return (prompts * answers).sum(-1).tolist()
