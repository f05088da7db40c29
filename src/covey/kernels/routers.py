"""Routers of a mixture of experts: the choice of experts for each token, recorded or replayed, whatever the family.

A router is the module whose forward draws the experts by `torch.topk` over as many scores as there are experts. Replaying puts other
indices into that call, and their scores from the same tensor, so that weights and gradients are the router's own (routing replay,
Ma et al. 2025, "R3", <https://arxiv.org/abs/2510.11370>).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from covey.errors import Unsupported

_TOPK = (torch.topk, Tensor.topk)


def expert_counts(model: nn.Module) -> set[int]:
    """Numbers of experts of the model's layers: of matrices in one parameter, or of modules in a list of experts."""
    return {count for _, count in _experts_by_place(model)}


def expert_layers(model: nn.Module) -> tuple[int, ...]:
    """Numbers of the layers that have experts, in order; dense ones are left out."""
    places = [re.search(r"\.(\d+)\.", place) for place, _ in _experts_by_place(model)]
    return tuple(sorted({int(place[1]) for place in places if place}))


def _experts_by_place(model: nn.Module) -> Iterator[tuple[str, int]]:
    for place, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and place.endswith("experts") and len(module) > 1:
            yield place, len(module)
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            weights = module.parameters(recurse=False)
            yield from ((place, len(weight)) for weight in weights if weight.ndim == 3 and len(weight) > 1)


@dataclass(eq=False)
class Routers:
    """The routers of a model, in the order in which a forward pass calls them."""

    modules: tuple[nn.Module, ...]
    calls: tuple[int, ...]
    """The place of the deciding call among a router's calls of `topk` over all experts."""
    num_experts: int
    top_k: int
    chosen: list[Tensor | None] = field(default_factory=list)
    """[M, k] by router, its own choices in the last forward pass."""
    replayed: Tensor | None = None
    """[M, L, k], the experts that the next passes take; below 0: the router's own."""
    _before: list[Any] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of stored ids."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def table(self, rows: int, longest: int, device: torch.device) -> Tensor:
        """[rows, longest, L, k] zeros, for the choices of as many texts."""
        return torch.zeros(rows, longest, len(self.modules), self.top_k, dtype=self.dtype, device=device)

    def switch(self, replayed: Tensor | None = None) -> None:
        """Record the choices of the passes that follow, and replay `replayed` [M, L, k] in them; until `release`."""
        if replayed is not None and tuple(replayed.shape[1:]) != (len(self.modules), self.top_k):
            raise ValueError(
                f"experts of {replayed.shape[1]} layers, {replayed.shape[2]} a token, cannot be replayed by {len(self.modules)} "
                f"routers of {self.top_k}"
            )
        self.replayed, self.chosen = replayed, [None] * len(self.modules)
        if self._before is None:
            self._before = [module.__dict__.get("forward") for module in self.modules]
            for place, module in enumerate(self.modules):
                module.__dict__["forward"] = self._watched(place, module)

    def release(self) -> None:
        """Leave the modules as they were."""
        for module, before in zip(self.modules, self._before or (), strict=self._before is not None):
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before
        self._before, self.replayed = None, None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of forward passes whose choices are recorded."""
        self.switch()
        try:
            yield
        finally:
            self.release()

    def taken(self) -> Tensor:
        """[M, L, k] of the last forward pass."""
        return torch.stack([ids for ids in self.chosen if ids is not None], 1).to(self.dtype)

    def _watched(self, place: int, module: nn.Module) -> Callable[..., Any]:
        assert self._before is not None
        forward = self._before[place] or type(module).forward.__get__(module)

        def call(*args: Any, **options: Any) -> Any:
            with _Watch(lambda number, scores, out: self._decide(place, number, scores, out), {self.num_experts}):
                return forward(*args, **options)

        return call

    def _decide(self, place: int, number: int, scores: Tensor, out: Any) -> Any:
        if number != self.calls[place]:
            return out
        drawn = out.indices.flatten(0, -2)
        self.chosen[place] = drawn.detach()
        if self.replayed is None:
            return out
        if len(self.replayed) != len(drawn):
            raise ValueError(f"experts of {len(self.replayed)} tokens cannot be replayed for {len(drawn)}")
        replacing = self.replayed[:, place].to(drawn)
        indices = torch.where(replacing < 0, drawn, replacing).view_as(out.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class _Watch(TorchFunctionMode):
    """Mode that hands each call of `topk` over a number of experts to `seen(number of the call, scores, result)`."""

    def __init__(self, seen: Callable[[int, Tensor, Any], Any], counts: set[int]) -> None:
        super().__init__()
        self.seen, self.counts, self.number = seen, counts, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.ndim < 2 or scores.shape[-1] not in self.counts or out.indices.shape[:-1] != scores.shape[:-1]:
            return out
        self.number += 1
        return self.seen(self.number, scores, out)


def find_routers(model: nn.Module, run: Callable[[Tensor], Any]) -> Routers | None:
    """Routers of the model, by a trial: `run(ids)` makes a forward pass of `ids` [1, T]; None for a model without experts.

    Raises Unsupported, with the reason, for routers whose choice cannot be replayed.
    """
    counts = expert_counts(model)
    if not counts:
        return None
    count = next(count for count in range(5, 100) if count not in counts)
    weight = next(model.parameters())
    # the first ids are often padding, whose embedding is zero
    tokens = torch.arange(3, 3 + count, device=weight.device)[None]
    name = type(model).__name__
    calls = _calls_of(run, counts, tokens)
    if not calls:
        raise Unsupported(f"no router of {name} chooses experts by top-k")
    order = list(dict.fromkeys(module for module, _, _ in calls))
    last = [[call for call in calls if call[0] is module][-1] for module in order]
    shapes = {shape for _, _, shape in last}
    if len(shapes) > 1:
        raise Unsupported(f"the routers of {name} choose different numbers of experts")
    ((num_experts, top_k),) = shapes
    if _weighs_masked_scores(run, counts, tokens):
        raise Unsupported(f"the routers of {name} hide groups of experts before they choose")
    numbers = tuple(number for _, number, _ in last)
    return Routers(tuple(order), numbers, num_experts, top_k)


def _calls_of(
    run: Callable[[Tensor], Any], counts: set[int], tokens: Tensor
) -> list[tuple[nn.Module, int, tuple[int, int]]]:
    """Router, number of the call in one of its forwards, and (experts, k) of each choice of a trial pass, in order."""
    stack: list[tuple[nn.Module, list[int]]] = []
    calls: list[tuple[nn.Module, int, tuple[int, int]]] = []

    def seen(_: int, scores: Tensor, out: Any) -> Any:
        module, made = stack[-1]
        made[0] += 1
        if out.indices.shape[:-1].numel() == tokens.numel():
            if any(earlier is module and number >= made[0] for earlier, number, _ in calls):
                raise Unsupported(f"a router of kind {type(module).__name__} serves several layers")
            calls.append((module, made[0], (scores.shape[-1], out.indices.shape[-1])))
        return out

    enter = nn.modules.module.register_module_forward_pre_hook(lambda module, _: stack.append((module, [0])))
    leave = nn.modules.module.register_module_forward_hook(lambda *_: (stack.pop(), None)[1], always_call=True)
    try:
        with torch.no_grad(), _Watch(seen, counts):
            run(tokens)
    finally:
        enter.remove()
        leave.remove()
    return calls


def _weighs_masked_scores(run: Callable[[Tensor], Any], counts: set[int], tokens: Tensor) -> bool:
    """True if scores of groups that a router hides are weights of experts too: an expert of such a group would get none."""
    hides = []

    def spoil(_: int, scores: Tensor, out: Any) -> Any:
        if out.indices.shape[:-1].numel() != tokens.numel():
            return out
        hidden = scores == scores.amin(-1, keepdim=True)
        hides.append(bool((4 * hidden.sum(-1) > scores.shape[-1]).all()))  # rounded scores may be tied by chance
        return torch.return_types.topk((out.values * torch.nan, out.indices)) if hides[-1] else out

    with torch.no_grad(), _Watch(spoil, counts):
        made = run(tokens)
    logits = getattr(made, "logits", made)
    return any(hides) and isinstance(logits, Tensor) and not bool(logits.isfinite().all())
