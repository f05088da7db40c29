"""Critic of PPO: a value head on the policy's hidden states, or a separate value model. GRPO and its variants have none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from covey.adapters import has_adapter
from covey.config.combinations import expect_together
from covey.errors import ConfigError
from covey.learner import shared_prompt
from covey.learner.measured import Measured
from covey.learner.packing import PaddedRows, Row, pad_rows, pick_rows
from covey.learner.policy import Policy
from covey.learner.shared_prompt import SharedRows
from covey.models import unwrapped
from covey.process.sharding import Shards


class Critic(Protocol):
    """Estimator of the return of each completion token."""

    def values(self, measured: Measured, batch: Sequence[Row]) -> Tensor:
        """Values [N, T], with gradient to the critic when gradients are enabled."""

    def parameters(self) -> list[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class NoCritic:
    """No critic: group-relative methods use the rewards of the group as baseline."""

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
    """Linear value head on the policy's hidden states, initialized to zero, in float32.

    The hidden states are detached: the value loss trains the head alone and leaves the policy to its own loss.
    """

    def __init__(self, hidden_size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.linear = _zero_linear(hidden_size, device)

    def values(self, measured: Measured, batch: Sequence[Row]) -> Tensor:
        return measured.rows.spread(_read(self.linear, measured.hidden.detach()))

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:  # type: ignore[override]
        return list(super().parameters(recurse))


class ValueModel(nn.Module):
    """Separate, fully trained decoder with a linear value head, initialized to zero (float32).

    The decoder is initialized from the policy's, without its adapters. It shares no
    weight with the policy, so it costs a second model's weights, gradients and optimizer state. Gradient checkpointing,
    dropout and the dtype of matmuls are those of the policy.
    """

    def __init__(self, decoder: nn.Module, hidden_size: int, policy: Policy, shards: Shards | None = None) -> None:
        super().__init__()
        self.shards = shards
        self.decoder = decoder
        self.linear = _zero_linear(hidden_size, policy.device)
        self.policy = policy

    @staticmethod
    def of(policy: Policy, shard: Callable[[nn.Module], Shards] | None = None) -> ValueModel:
        """A critic initialized from the current policy, sharded over processes by `shard`.

        Raises ConfigError if the policy cannot be copied and trained.
        """
        decoder = _decoder_copy(policy.model).requires_grad_(True)
        shards = None if shard is None else shard(decoder)
        return ValueModel(decoder, unwrapped(policy.model).config.get_text_config().hidden_size, policy, shards)

    def values(self, measured: Measured, batch: Sequence[Row]) -> Tensor:
        rows, inputs = self._inputs(measured, batch)
        self.decoder.train(self.policy.model.training)  # dropout and checkpointing follow the policy's mode

        def work() -> Tensor:
            with self.policy.autocast():
                hidden: Tensor = self.decoder(**inputs, use_cache=False).last_hidden_state  # [N, S, D]
            return hidden

        hidden = self.policy.within(work) if self.shards is None else self.shards.run(work)
        return rows.spread(_read(self.linear, pick_rows(hidden, rows.source)))

    def _inputs(self, measured: Measured, batch: Sequence[Row]) -> tuple[PaddedRows | SharedRows, dict[str, Any]]:
        """Rows and keywords of the decoder: padded rows, or the policy's packed ones where processes share out their tokens."""
        rows = measured.rows
        expect_together("separate critic", bool(rows.placed) and "media")
        if self.policy.context is None or not isinstance(rows, SharedRows):
            rows = pad_rows(batch, self.policy.pad_id, self.policy.device)
            return rows, {"input_ids": rows.input_ids}
        rows = replace(rows, windows=self.policy.windows, placed=())
        shared_prompt.switch(self.decoder)  # for good: it has no other rows
        return rows, shared_prompt.forward_kwargs(rows, self.decoder)

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:  # type: ignore[override]
        return list(super().parameters(recurse))


def _zero_linear(hidden_size: int, device: torch.device | None) -> nn.Linear:
    linear = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _read(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """[M] values of [M, D] hidden states, in the dtype of the head."""
    values: Tensor = linear(hidden.to(linear.weight.dtype)).squeeze(-1)
    return values


def _decoder_copy(model: Any) -> nn.Module:
    """A copy of the decoder, without adapters, in floating point."""
    if has_adapter(model):
        adapted = copy.deepcopy(model)
        model = adapted.unload() if hasattr(adapted.base_model, "unload") else adapted.get_base_model()
    decoder = copy.deepcopy(model.get_decoder()) if hasattr(model, "get_decoder") else None
    if not isinstance(decoder, nn.Module):
        raise ConfigError(
            f"{type(model).__name__} has no decoder that a separate critic could copy; use critic model='head'."
        )
    is_quantized = not all(parameter.is_floating_point() for parameter in decoder.parameters())
    expect_together("separate critic", is_quantized and "QLoRA")
    return decoder
