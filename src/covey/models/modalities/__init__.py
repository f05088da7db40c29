"""Images, sounds and videos inside a model: its inputs for several prompts, and its embeddings of a prompt with media."""

from covey.models.modalities.embedding import (
    Embedded,
    Placed,
    embed,
    forget_positions,
    placed_inputs,
    placed_rows,
    reason_against,
    watched_positions,
    whole_inputs,
)
from covey.models.modalities.inputs import banned_ids, computes_positions, media_inputs, refuse_loose_places
from covey.models.modalities.processors import load_processing, without_video

__all__ = [
    "Embedded", "Placed", "banned_ids", "computes_positions", "embed", "forget_positions", "load_processing",
    "media_inputs", "placed_inputs", "placed_rows", "reason_against", "refuse_loose_places", "watched_positions",
    "whole_inputs", "without_video",
]  # fmt: skip
