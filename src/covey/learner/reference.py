"""The reference model of the KL term, and its updates towards the policy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from covey.config.combinations import expect_together
from covey.learner.measured import Measured
from covey.learner.packing import PaddedRows, Row
from covey.learner.policy import Policy
from covey.learner.shared_prompt import SharedRows
from covey.learner.signals import Other, Share, Signal, hidden_of
from covey.process.sharding import Shards, copy_into, is_sharded, local


@dataclass(frozen=True, eq=False)
class DistanceTo:
    """Another model for a distance over the whole vocabulary; `swapped` is the context in which its weights are in place."""

    policy: Policy
    distance: Callable[[Tensor, Tensor], Tensor]
    swapped: Callable[[], AbstractContextManager[Any]] = nullcontext

    def at(self, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Signal:
        with self.swapped(), self.policy.routing.watching(self.policy, packed, rows):
            hidden, head = hidden_of(self.policy, packed)
        share = Share(torch.arange(len(hidden), device=hidden.device), Other(hidden, head, self.distance))
        return Signal((share,), torch.ones(len(rows), dtype=torch.bool, device=hidden.device))


class Reference(Protocol):
    """Reference model: frozen unless an update rule mixes the policy in."""

    moves: int
    """Number of intended weight changes: by the update rule, or from a checkpoint."""

    def weights(self) -> dict[str, Tensor]:
        """Weights that it does not share with the policy."""

    def measure(self, rows: Sequence[Row]) -> Measured | None:
        """Log-probabilities of the reference; None without a reference."""

    def against(self, distance: Callable[[Tensor, Tensor], Tensor]) -> DistanceTo | None:
        """The reference as the other model of a distance over the whole vocabulary; None without a reference."""

    def mix(self, policy: Policy, alpha: float) -> None:
        """`ref <- (1 - alpha) ref + alpha policy`: 0 keeps, 1 copies (TR-DPO, Gorbatovski et al. 2024, eq. 9)."""

    def state_dict(self) -> dict[str, Tensor]:
        """Weights for a checkpoint; empty while the reference is still the model that training started from."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class NoReference:
    """No reference model."""

    moves = 0

    def weights(self) -> dict[str, Tensor]:
        return {}

    def measure(self, rows: Sequence[Row]) -> Measured | None:
        return None

    def against(self, distance: Callable[[Tensor, Tensor], Tensor]) -> DistanceTo | None:
        return None

    def mix(self, policy: Policy, alpha: float) -> None:
        return None

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        return None


def frozen_copy(model: nn.Module) -> Any:
    """A copy of the model, in evaluation mode and without gradients."""
    return copy.deepcopy(model).eval().requires_grad_(False)


@dataclass(eq=False)
class FrozenCopy:
    """A full copy of the model, for full fine-tuning."""

    policy: Policy
    has_moved: bool = False
    follows: bool = False
    """True if an update rule may change it; then every checkpoint holds it, so that a run can roll back to any."""
    moves: int = 0
    exact: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        policy: Policy,
        *,
        follows: bool = False,
        shard: Callable[[torch.nn.Module], Shards] | None = None,
        model: Any = None,
    ) -> FrozenCopy:
        """A copy of the current policy, sharded over processes by `shard`; the policy must not be sharded yet.

        `model`: a copy that was made before.
        """
        model = frozen_copy(policy.model) if model is None else model
        frozen = replace(policy, model=model, auxiliary_coefficient=0.0)
        return FrozenCopy(frozen if shard is None else frozen.sharded(shard), follows=follows)

    @torch.no_grad()
    def measure(self, rows: Sequence[Row]) -> Measured | None:
        return self.policy.measure(rows)

    def against(self, distance: Callable[[Tensor, Tensor], Tensor]) -> DistanceTo | None:
        return DistanceTo(self.policy, distance)

    @torch.no_grad()
    def mix(self, policy: Policy, alpha: float) -> None:
        if alpha == 0.0:
            return
        self.has_moved = True
        self.moves += 1
        for (name, mine), theirs in zip(self.weights().items(), policy.model.parameters(), strict=True):
            _mix(mine, theirs, alpha, name, self.exact)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.policy.model.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights() | self.exact if self.has_moved or self.follows else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.moves += 1
        self.exact = _load(self.weights(), state)
        self.has_moved = bool(state)


@dataclass(eq=False)
class AdapterCopy:
    """Reference for PEFT: the base weights are shared with the policy, only the adapter is copied.

    It starts as the given adapter, so the KL is 0 at step 0 also for a loaded adapter. A fresh LoRA adapter
    changes nothing, so there the reference is the base model.
    """

    policy: Policy
    adapter: dict[str, Tensor]
    has_moved: bool = False
    moves: int = 0
    exact: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(policy: Policy) -> AdapterCopy:
        return AdapterCopy(policy, {name: p.detach().clone() for name, p in _trainable(policy.model).items()})

    @contextmanager
    def swapped(self) -> Iterator[None]:
        now = _trainable(self.policy.model)
        held = {name: _held(parameter) for name, parameter in now.items()}
        was_training = self.policy.model.training
        self.policy.model.eval()
        _put(now, self.adapter)
        try:
            yield
        finally:
            _put(now, held)
            self.policy.model.train(was_training)

    @torch.no_grad()
    def measure(self, rows: Sequence[Row]) -> Measured | None:
        with self.swapped():
            return self.policy.measure(rows)

    def against(self, distance: Callable[[Tensor, Tensor], Tensor]) -> DistanceTo | None:
        """The head is shared with the policy, so an adapter on it cannot be told apart: ConfigError."""
        head = self.policy.output_layer()
        is_adapted = any(parameter.requires_grad for parameter in head.parameters())
        expect_together("full-distribution KL", is_adapted and "LoRA on the output layer")
        return DistanceTo(self.policy, distance, self.swapped)

    @torch.no_grad()
    def mix(self, policy: Policy, alpha: float) -> None:
        if alpha == 0.0:
            return
        self.has_moved = True
        self.moves += 1
        for name, parameter in _trainable(policy.model).items():
            _mix(self.adapter[name], parameter.detach(), alpha, name, self.exact)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.adapter)

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights() | self.exact  # always: a resumed adapter is no longer that of the start

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.moves += 1
        self.exact = _load(self.adapter, state)


def _trainable(model: nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _held(parameter: torch.nn.Parameter) -> Tensor:
    """A copy of the parameter's values, to restore later."""
    return parameter.detach().clone() if is_sharded(parameter) else parameter.data


@torch.no_grad()
def _put(parameters: Mapping[str, torch.nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Swap in values by exchanging storage; for sharded parameters by copying, because FSDP gathers from their storage."""
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            local(parameter).copy_(local(values[name]))
        else:
            parameter.data = values[name]


def _mix(mine: Tensor, theirs: Tensor, alpha: float, name: str, exact: dict[str, Tensor]) -> None:
    """`mine <- (1 - alpha) mine + alpha theirs`. Weights in 16 bits round small steps away, so their average stays in float32 in `exact`."""
    if alpha == 1.0 or not mine.is_floating_point():
        exact.pop(name, None)
        mine.copy_(theirs)
    elif mine.element_size() > 2:
        mine.lerp_(theirs.to(mine.dtype), alpha)
    else:
        exact[name] = exact.get(name, mine.detach()).float().lerp_(theirs.float(), alpha)
        mine.copy_(exact[name])


@torch.no_grad()
def _load(into: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore the weights. Returns those that are kept in float32 too, as of `_mix`."""
    exact: dict[str, Tensor] = {}
    for name, value in state.items():
        copy_into(into[name], value)
        if value.element_size() > into[name].element_size():
            copy_into(exact.setdefault(name, into[name].detach().float()), value)
    return exact
