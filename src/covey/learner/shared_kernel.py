"""Choice of the kernel that computes the attention of shared prompts."""

import logging
from collections.abc import Set
from functools import lru_cache
from typing import Any

from covey.errors import ConfigError
from covey.kernels import AttentionHeads, SharedPromptAttention
from covey.learner import shared_prompt
from covey.process.sharding import compute_device

logger = logging.getLogger(__name__)


def choose_kernel(model: Any, choice: str, heads: Set[AttentionHeads]) -> str:
    """Attention kernel for layers of these shapes. Raises ConfigError if FlexAttention was requested and cannot run."""
    if choice == "sdpa" or (choice == "auto" and compute_device(next(model.parameters())).type == "cpu"):
        return "sdpa" if choice == "sdpa" else "own"
    dropped = (
        "its attention drops weights at random (disable_dropout=True ends that)" if shared_prompt.drops(model) else None
    )
    unseen = None if heads else "its layers cannot be looked at from here"
    reason = dropped or unseen or next(filter(None, map(SharedPromptAttention.flex_unavailable_reason, heads)), None)
    if reason is None:
        return "flex"
    if choice == "flex":
        raise ConfigError(f"shared_attention='flex', but FlexAttention is not used: {reason}; leave it out.")
    _tell_once(f"Shared prompts are computed through SDPA by part, not FlexAttention: {reason}.")
    return "sdpa"


@lru_cache
def _tell_once(message: str) -> None:
    logger.warning("%s", message)
