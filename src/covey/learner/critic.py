"""The value estimate of PPO: a head on the policy's own hidden states. GRPO and its kin have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from covey.learner.packing import Row
from covey.learner.policy import Measured


class Critic(Protocol):
    """What estimates the return of each completion token."""

    def values(self, measured: Measured, batch: Sequence[Row]) -> Tensor:
        """[N, T], with gradient to the critic when gradients are enabled."""
        ...

    def parameters(self) -> list[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class NoCritic:
    """Group-relative methods compare siblings instead of estimating values."""

    def values(self, measured: Measured, batch: Sequence[Row]) -> Tensor:
        return torch.zeros_like(measured.logp)

    def parameters(self) -> list[nn.Parameter]:
        return []

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        return None


def no_critic() -> Critic:
    return NoCritic()


class ValueHead(nn.Module):
    """A linear map of the policy's hidden states, zero at the start, in float32.

    The hidden states are detached: the value loss trains the head alone and leaves the policy to its own loss.
    """

    def __init__(self, hidden_size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def values(self, measured: Measured, batch: Sequence[Row]) -> Tensor:
        return measured.rows.spread(self.linear(measured.hidden.detach().float()).squeeze(-1))

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:  # type: ignore[override]
        return list(super().parameters(recurse))
