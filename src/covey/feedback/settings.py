"""Settings of learning from feedback, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import ConfigError
from covey.feedback.gate import smallest_set


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an endpoint that learns. Raises ConfigError for one that cannot work."""

    folder: Path
    """Folder of scores and versions."""
    model: str
    """Folder or hub id of the model that is served."""
    fixed_rows: tuple[Mapping[str, Any], ...]
    """Rows of the fixed set, column `prompt`; never trained on."""
    rewards: tuple[str, ...]
    """Rewards that score the fixed set, by name or import path."""
    reward_weights: tuple[float, ...] | None = None
    tolerance: float = 0.02
    """Loss of mean reward on the fixed set that a promotion may risk."""
    scores_per_candidate: int = 128
    """Scored conversations that a candidate is trained on."""
    batch_size: int = 32
    """Conversations of an optimizer step."""
    learning_rate: float = 2e-4
    beta: float = 0.01
    """Weight of the KL to the served version."""
    lora_r: int = 16
    max_age_seconds: float = 24 * 3600.0
    """Age of an answer from which on its score comes too late."""
    max_tokens: int = 256
    """Most tokens of an answer to the fixed set."""
    num_samples: int = 4
    """Answers drawn to each prompt of the fixed set."""
    dtype: str = "float32"
    trust_remote_code: bool = False
    use_cpu: bool = False
    users: bool = False
    """An adapter for each user, learnt of that user's scores alone."""
    max_users: int = 64
    """Users who may have an adapter."""
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("learning_rate", "max_age_seconds")
        for name in positive:
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name} is {getattr(self, name)}; give a finite number above 0.")
        for name in ("tolerance", "beta"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name} is {getattr(self, name)}; give a finite number of at least 0.")
        for name in ("lora_r", "max_tokens", "num_samples", "max_users"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more.")
        if not 2 <= self.batch_size <= self.scores_per_candidate:
            raise ConfigError(
                f"a step takes {self.batch_size} conversations (--per-device-train-batch-size) and a candidate {self.scores_per_candidate} "
                "(--scores-per-candidate); give at least 2 for a step, whose mean score is the baseline, and as many or more for a candidate."
            )
        if not self.rewards:
            raise ConfigError("learning needs a reward that scores the fixed set; give --reward.")
        if self.tolerance and len(self.fixed_rows) < smallest_set(self.tolerance):
            raise ConfigError(
                f"the fixed set has {len(self.fixed_rows)} prompts, too few to show that so little as {self.tolerance:g} is not "
                f"lost: give {smallest_set(self.tolerance)} or more, or a larger --tolerance."
            )
        if not self.fixed_rows:
            raise ConfigError("learning needs a fixed set that shows what may not be lost; give --fixed-set.")
