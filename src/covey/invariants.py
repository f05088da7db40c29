"""What must not change while a run goes on, looked at whenever it saves: a checkpoint of a broken run helps nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from covey.errors import InvariantError
from covey.learner import Learner
from covey.world import World

Fingerprints = dict[str, str]


@dataclass(eq=False)
class Watch:
    """Frozen weights stay as they are, and the reference moves by its rule alone.

    Remembers a fingerprint of each. A weight that is trained now is not looked at; one that is frozen later is, from then on.
    """

    learner: Learner
    frozen: Fingerprints = field(default_factory=dict)
    reference: Fingerprints = field(default_factory=dict)
    moves: int = -1
    """Of the reference, when its fingerprint was taken."""

    def later(self) -> Callable[[], None]:
        """What compares with the last look, to be called beside training; done at once where that would not be safe.

        Raises InvariantError, naming the first weight that differs; so does what is returned.
        """
        moves = self.learner.reference.moves
        if self.learner.policy.device.type != "cpu" or moves != self.moves:
            self._look(moves)
            return lambda: None
        return partial(self._look, moves)

    def _look(self, moves: int) -> None:
        frozen = fingerprints(frozen_weights(self.learner.policy.model))
        if name := first_difference(self.frozen, frozen):
            raise InvariantError(
                f"The frozen weight {name} has changed since the last look, though nothing trains it; look for a callback or "
                "reward that writes to the model, or an adapter merged into it, and resume from the last checkpoint."
            )
        reference = fingerprints(self.learner.reference.weights())
        stood_still = self.learner.reference.moves == moves
        if stood_still and self.moves == moves and (name := first_difference(self.reference, reference)):
            raise InvariantError(
                f"The reference model's weight {name} has changed though its rule did not move it; look for code that shares "
                "its tensors or writes to them, and resume from the last checkpoint."
            )
        self.frozen, self.reference, self.moves = frozen, reference, moves if stood_still else -1


def expect_same_weights(model: torch.nn.Module, world: World) -> None:
    """Raise InvariantError on every process unless all hold the same trained weights, bit for bit."""
    if world.size == 1:
        return
    trained = fingerprints({name: p for name, p in model.named_parameters() if p.requires_grad})
    everyone = [part[0] for part in world.gather([trained])]
    for rank, theirs in enumerate(everyone):
        if name := first_difference(everyone[0], theirs):
            raise InvariantError(
                f"The weight {name} of rank {rank} differs from rank 0's, so the processes train two models; look for code that "
                "runs on one process only and touches the model, and resume from the last checkpoint."
            )


def frozen_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters that take no gradient, by name."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad and not p.is_meta}


@torch.no_grad()
def fingerprints(tensors: Mapping[str, Tensor]) -> Fingerprints:
    """A short text for each tensor that differs when a bit of it does.

    xxh3-64 of the bytes in the host's memory; on an accelerator the sum of the bits as integers, which needs no copy there.
    """
    plain = {name: value.detach().as_subclass(Tensor) for name, value in tensors.items() if value.numel()}
    held = {
        name: value.contiguous() for name, value in plain.items()
    }  # quantized weights are tensors of their own kind
    sums = {name: _bits(value).sum(dtype=torch.int64) for name, value in held.items() if value.device.type != "cpu"}
    totals = torch.stack([total.cpu() for total in sums.values()]).tolist() if sums else []
    found = {name: f"sum {total}" for name, total in zip(sums, totals, strict=True)}
    return found | {name: _hash(value) for name, value in held.items() if name not in sums}


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first name that both have with another value; None when there is none."""
    return next((name for name, value in now.items() if name in before and before[name] != value), None)


def expect_adapter_reloads(model: Any, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
    """Raise InvariantError unless the adapter in `folder` loads as the one of `model`, bit for bit.

    The same tensors under the same options on the same base give the same logits. `weights` as in `write_model`.
    A model without an adapter is not looked at.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return
    from peft import PeftConfig, get_peft_model_state_dict, load_peft_weights

    name = model.active_adapter
    place = folder if name == "default" else folder / str(name)
    saved = load_peft_weights(str(place), device="cpu")
    mine = {
        key: value.detach().cpu()
        for key, value in get_peft_model_state_dict(model, state_dict=weights, adapter_name=name).items()
    }
    wrong = next((key for key in {**mine, **saved} if not _is_same(mine.get(key), saved.get(key))), None)
    asked, found = model.peft_config[name].to_dict(), PeftConfig.from_pretrained(str(place)).to_dict()
    option = next((key for key in _OPTIONS if key in asked and _plain(asked[key]) != _plain(found.get(key))), None)
    if wrong is not None or option is not None:
        what = f"its tensor {wrong} differs" if wrong is not None else f"its option {option} differs"
        raise InvariantError(
            f"The adapter written to {folder.name} does not load as the one that is trained ({what}), so it would answer "
            "otherwise; check the versions of peft and the adapter's options."
        )


_OPTIONS = (
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias"),
    *("fan_in_fan_out", "target_modules", "modules_to_save", "layers_to_transform"),
)
"""What decides how an adapter's tensors are used."""


def _plain(value: Any) -> Any:
    return sorted(value, key=repr) if isinstance(value, set | list | tuple) else value


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return _hash(one.contiguous()) == _hash(other.contiguous())


def _bits(value: Tensor) -> Tensor:
    """The tensor's memory as integers of 2 bytes, or of 1 where it has no even number."""
    flat = value.view(-1).view(torch.uint8)
    return flat.view(torch.int16) if flat.numel() % 2 == 0 else flat


def _hash(value: Tensor) -> str:
    content: Any = value.view(-1).view(torch.uint8).numpy()  # a buffer, though its type does not say so
    return xxhash.xxh3_64_hexdigest(content) if value.numel() else "empty"
