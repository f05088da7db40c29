"""Options of a run. `GRPOConfig` and `batch_arithmetic` are imported when they are asked for: the rest loads without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.config.grpo_config import GRPOConfig as GRPOConfig
    from covey.config.grpo_config import batch_arithmetic as batch_arithmetic

__all__ = ["GRPOConfig", "batch_arithmetic"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'covey.config' has no attribute {name!r}")
    return getattr(importlib.import_module("covey.config.grpo_config"), name)
