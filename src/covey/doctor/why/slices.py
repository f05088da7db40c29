"""Slices of the data whose rewards contradict those of similar completions of other prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.doctor.why.recorded import Recorded
from covey.learner import Learner
from covey.learner.packing import rows_of
from covey.types import Group

Array = np.ndarray[Any, Any]

_LIKELY = 0.01
"""Largest p-value of a slice that is named, divided by the number of slices."""
_FEWEST_GROUPS = 3
_DRAWS = 10_000
_SKETCH = 16_384
_RIDGE = 1.0
"""Ridge of the regression, in means of the kernel's diagonal."""


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A slice that is paid for the opposite of what the regression on other groups expects."""

    said: str
    """Column and value, such as `source = web`."""
    places: tuple[int, ...]
    """Its groups with signal in the step."""
    p_value: float
    """One-sided, from permutations of the slice's groups with the others; corrected for the number of slices."""


def contradictions(recorded: Recorded) -> list[Contradiction]:
    """Slices of the step whose rewards contradict those of the rest, likeliest first. The weights must be those before the step.

    Advantages of each group are predicted from all other groups of the step and of steps recorded before: kernel ridge regression on
    gradients of log-probabilities (the neural tangent kernel, Jacot et al. 2018; sketched as in TRAK, Park et al. 2023), centred by group.
    A slice is a value of a column of the data, of three groups with signal at least and of half of all at most.
    """
    pool = [*recorded.groups, *recorded.earlier_groups]
    loud = [i for i, group in enumerate(pool) if _has_signal(group)]
    groups, num_now = [pool[i] for i in loud], sum(i < len(recorded.groups) for i in loud)
    slices = _slices(groups, num_now)
    if not slices:
        return []
    expected = _predicted(_kernel(recorded.learner, groups), [_advantages(group) for group in groups])
    scores = np.array([e @ a / np.linalg.norm(a) for e, a in zip(expected, map(_advantages, groups), strict=True)])
    contradicting = []
    for members, description in slices.items():
        indices = list(members)
        p = _p_value(scores, indices) * len(slices)
        if p < _LIKELY and scores[indices].mean() < 0:
            contradicting.append(
                Contradiction(said=description, places=tuple(loud[i] for i in indices if i < num_now), p_value=p)
            )
    return sorted(contradicting, key=lambda contradiction: contradiction.p_value)


def _slices(groups: Sequence[Group], num_now: int) -> dict[tuple[int, ...], str]:
    """Places of the groups of each slice that has a group among the first `num_now`."""
    members: dict[tuple[str, Any], list[int]] = {}
    for i, group in enumerate(groups):
        for name, value in group.prompt.columns.items():
            if isinstance(value, str | int):
                members.setdefault((name, value), []).append(i)
    fits = lambda places: _FEWEST_GROUPS <= len(places) <= len(groups) / 2 and places[0] < num_now
    return {tuple(places): f"{name} = {value}" for (name, value), places in members.items() if fits(places)}


def _predicted(kernel: Array, advantages: Sequence[Array]) -> list[Array]:
    """Leave-one-group-out predictions of ridge regression: a - (M_ii)^-1 (M a)_i with M = (K + l I)^-1."""
    inverse = np.linalg.inv(kernel + _RIDGE * np.trace(kernel) / len(kernel) * np.eye(len(kernel)))
    fitted = inverse @ np.concatenate(advantages)
    ends = np.cumsum([len(group_advantages) for group_advantages in advantages])
    parts = [slice(end - len(group_advantages), end) for end, group_advantages in zip(ends, advantages, strict=True)]
    return [a - np.linalg.solve(inverse[i, i], fitted[i]) for a, i in zip(advantages, parts, strict=True)]


def _kernel(learner: Learner, groups: Sequence[Group]) -> Array:
    """[N, N] cosines of the completions' gradients, divided by the root of Adam's second moments, centred by group."""
    weights = learner.trainable()
    moments = [learner.optimizer.state.get(p, {}).get("exp_avg_sq") for p in weights]
    scales = [1.0 if m is None else (m.sqrt() + 1e-6).rsqrt() for m in moments]
    chance = torch.Generator().manual_seed(0)
    signs = [torch.randint(0, 2, p.shape, generator=chance, dtype=torch.int8).to(p.device) * 2 - 1 for p in weights]
    learner.policy.model.eval()
    sketches = []
    for row in rows_of(groups):
        logp = learner.policy.measure([row]).logp[0, : row.completion.num_tokens].float()
        (logp * row.counts.to(logp.device)).mean().backward()
        flat = [p.grad * a * s for p, a, s in zip(weights, scales, signs, strict=True) if p.grad is not None]
        sketches.append(torch.nn.functional.normalize(_fold(flat), dim=0).cpu())
        learner.forget()
    learner.policy.release()
    features = torch.stack(sketches).double()
    sizes = [group.size for group in groups]
    features = torch.cat([part - part.mean(0) for part in features.split(sizes)])
    return np.asarray(features @ features.T)


def _fold(parts: Sequence[Tensor]) -> Tensor:
    """[_SKETCH] sums of the elements at equal places modulo its length; with random signs, inner products are kept in expectation."""
    out = torch.zeros(_SKETCH, device=parts[0].device)
    for part in parts:
        flat = part.flatten().float()
        out += torch.nn.functional.pad(flat, (0, -len(flat) % _SKETCH)).view(-1, _SKETCH).sum(0)
    return out


def _p_value(scores: Array, indices: Sequence[int]) -> float:
    rng = np.random.default_rng(0)
    drawn = scores[rng.permuted(np.tile(np.arange(len(scores)), (_DRAWS, 1)), axis=1)[:, : len(indices)]].mean(1)
    return float((1 + (drawn <= scores[list(indices)].mean() + 1e-12).sum()) / (1 + _DRAWS))


def _has_signal(group: Group) -> bool:
    return group.advantages is not None and group.advantages.ndim == 1 and bool(group.advantages.abs().max() > 0)


def _advantages(group: Group) -> Array:
    assert group.advantages is not None
    return np.asarray(group.advantages, dtype=np.float64)
