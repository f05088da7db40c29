"""Options of a run. `GRPOConfig` and `batch_arithmetic` are imported when they are asked for: the rest loads without torch."""

from typing import TYPE_CHECKING

from covey.names import lazy

if TYPE_CHECKING:
    from covey.config.batches import batch_arithmetic as batch_arithmetic
    from covey.config.grpo_config import GRPOConfig as GRPOConfig

__all__ = ["GRPOConfig", "batch_arithmetic"]
__getattr__ = lazy(__name__, {"grpo_config": "GRPOConfig", "batches": "batch_arithmetic"})
