"""Images inside a vision-language model: its inputs for several prompts, and its embeddings of a prompt with images."""

from covey.images.embedding import Embedded, Placed, embed, placed_inputs, reason_against, watched_positions
from covey.images.inputs import banned_ids, computes_positions, image_inputs, refuse_images, refuse_loose_places
from covey.images.processors import load_processing, without_video

__all__ = [
    "Embedded",
    "Placed",
    "banned_ids",
    "computes_positions",
    "embed",
    "image_inputs",
    "load_processing",
    "placed_inputs",
    "reason_against",
    "refuse_images",
    "refuse_loose_places",
    "watched_positions",
    "without_video",
]
