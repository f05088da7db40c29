"""Attestation of a running server: whether it computes with the weights of a folder, by its log-probabilities alone.

Three hypotheses are told apart, each by the numbers of a probe of fixed random tokens:

* *near*: the mean distance from the folder's own log-probabilities is what rounding in the expected dtype does. Rounding is measured on
  the same probe: the same weights in bfloat16 against float32. float16 rounds to 11 bits where bfloat16 rounds to 8.
* *other dtype*: it is what a coarser dtype does.
* *other weights*: it is beyond that; or, with a second folder named, the regression of (server - second) on (first - second) has slope
  0 and not 1. That finds a difference far below rounding, such as an adapter that is one update behind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from covey.errors import ConfigError, ServerError
from covey.evaluation.scored_tokens import ScoredTokens

PROBES, PROBE_TOKENS = 8, 64
SLOPE_PROBES = 32
"""Probes where a slope decides, whose error falls with the square root of their number."""
LEAST_TOKENS = 32
TIMES_ROUNDING = 4.0
"""Factor on the measured rounding up to which a distance is rounding: other kernels add up in another order."""
KERNELS = 1e-4
"""Distance in nats that float32 kernels reach by their order of summation; TensorFloat-32 is beyond it."""
SIGMAS = 5.0
"""Standard errors by which a slope has to be nearer to one folder than to the other."""
WHOLE = 0.8
"""Slope below which a part of the update is missing."""
ROUNDING = {"float32": 2.0**-16, "float16": 2.0**-3, "bfloat16": 1.0}
"""Rounding of each dtype as a share of bfloat16's, by bits of its significand: 24, 11 and 8."""

Verdict = Literal["attested", "other dtype", "other weights", "not decidable"]


@dataclass(frozen=True)
class Slope:
    """Regression of the server's log-probabilities between two folders: 1 means the first, 0 the second. Clustered errors."""

    value: float
    error: float

    @property
    def chance(self) -> float:
        """Probability of a slope this far beyond the middle for a server with the other folder's weights."""
        return _tail(abs(self.value - 0.5) / self.error)


@dataclass(frozen=True)
class ServedWeights:
    """Outcome of an attestation. Distances are mean absolute differences of log-probabilities in nats."""

    verdict: Verdict
    distance: float
    limit: float
    """Largest distance that rounding in the expected dtype explains."""
    expected_dtype: str
    nearest_dtype: str | None
    """Coarsest precision that the distance needs; None: beyond all of them."""
    tokens: int
    chance: float
    """Probability that this verdict is false, by the spread over tokens."""
    detectable: float
    """Smallest change of weights that would have been refused, as its mean change of log-probabilities on the probe, in nats."""
    slopes: Mapping[str, Slope]

    @property
    def sentence(self) -> str:
        near = f"{self.distance:.2g} nats from this folder's over {self.tokens} tokens"
        if self.verdict == "attested":
            return f"The server computes with these weights: its log-probabilities are {near}, where up to {self.limit:.2g} is rounding."
        if self.verdict == "other dtype":
            return (
                f"The server does not compute in {self.expected_dtype} with these weights: its log-probabilities are {near}, where up to "
                f"{self.limit:.2g} is rounding. {self.nearest_dtype} explains it; so do weights that differ by as little (name them "
                "with --other)."
            )
        if self.verdict == "not decidable":
            return (
                "The two folders differ too little on the probe for the server's rounding; nothing can be said of them."
            )
        if nearer := [name for name, slope in self.slopes.items() if slope.value < 0.5]:
            return f"The server does not compute with these weights but with those of {nearer[0]}, or nearer to them (slope {self.slopes[nearer[0]].value:.2f})."
        if self.slopes and self.nearest_dtype is not None:
            name, slope = min(self.slopes.items(), key=lambda item: item[1].value)
            return f"The server does not compute with these weights: a part of what differs from {name} is missing (slope {slope.value:.2f})."
        return (
            f"The server computes with other weights, or quantizes them: its log-probabilities are {near}, where up to "
            f"{self.limit:.2g} is rounding."
        )


@dataclass(frozen=True, eq=False)
class Reference:
    """Log-probabilities of the scored tokens by a folder, each [K] float64."""

    stored: Tensor
    """In float32, with weights rounded to the server's dtype, in which a part of a small update is lost."""
    computed: Tensor
    """In the server's dtype."""


def probes(vocabulary: int, context: int | None = None, count: int = PROBES) -> list[tuple[int, ...]]:
    """Probes of tokens drawn from a fixed seed over the whole vocabulary, so that no prompt in a server's cache resembles them."""
    length = min(PROBE_TOKENS, (context or PROBE_TOKENS + 1) - 1)
    generator = torch.Generator().manual_seed(20261126)
    return [tuple(torch.randint(vocabulary, (length,), generator=generator).tolist()) for _ in range(count)]


@torch.no_grad()
def logprobs_of(model: Any, answers: Sequence[ScoredTokens]) -> Tensor:
    """[K] float64: a model's log-probabilities of the tokens that a server scored, by a plain forward.

    Raises ServerError for a token that the model has no embedding for.
    """
    embeddings = model.get_input_embeddings().weight
    values = []
    for answer in answers:
        if max(answer.ids) >= len(embeddings):
            raise ServerError(
                f"The server scored token {max(answer.ids)}, but this folder's vocabulary has {len(embeddings)}: it serves another model."
            )
        ids = torch.tensor([answer.ids], device=embeddings.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        logp = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].double().cpu()
        values.append(logp[torch.tensor([value is not None for value in answer.logp[1:]])])
    return torch.cat(values)


def served_values(answers: Sequence[ScoredTokens]) -> Tensor:
    """[K] float64: the server's log-probabilities, in the order of `logprobs_of`. Raises ServerError if they are too few to judge by."""
    values = [value for answer in answers for value in answer.logp[1:] if value is not None]
    if len(values) < LEAST_TOKENS:
        raise ServerError(
            f"The server gives log-probabilities of {len(values)} tokens; a verdict needs {LEAST_TOKENS}."
        )
    return torch.tensor(values, dtype=torch.float64)


def attest(
    served: Tensor, exact: Tensor, in_bfloat16: Tensor, dtype: str, mine: Reference, others: Mapping[str, Reference]
) -> ServedWeights:
    """Verdict on a server's log-probabilities [K] against those of a folder, and of others that it may serve instead.

    `dtype`: the dtype in which the server is to compute. `exact` and `in_bfloat16` [K] are the folder's in float32 and bfloat16.
    Raises ConfigError for an unknown dtype.
    """
    if dtype not in ROUNDING:
        raise ConfigError(f"dtype {dtype!r} is unknown; use one of {', '.join(ROUNDING)}.")
    distances, rounding = (served - exact).abs(), float((in_bfloat16 - exact).abs().mean())
    distance, count = float(distances.mean()), len(distances)
    error = float(distances.std()) / math.sqrt(count) if count > 1 else math.inf
    limits = {name: max(KERNELS, TIMES_ROUNDING * share * rounding) for name, share in ROUNDING.items()}
    nearest = next((name for name, limit in limits.items() if distance <= limit), None)
    limit = limits[dtype]
    slopes = {name: _slope(served, mine, other) for name, other in others.items()}
    verdict = _verdict(distance, limit, nearest, slopes)
    chance = _tail(abs(limit - distance) / error) if error > 0 else 0.0
    if slopes and nearest is not None:  # the slopes decided
        chance = max(slope.chance for slope in slopes.values())
    sizes = {name: float((mine.stored - other.stored).abs().mean()) for name, other in others.items()}
    margins = [2 * SIGMAS * slope.error * sizes[name] for name, slope in slopes.items()]
    detectable = max(margins) if margins else limit + rounding + SIGMAS * error
    return ServedWeights(verdict, distance, limit, dtype, nearest, len(served), chance, detectable, slopes)


def _verdict(distance: float, limit: float, nearest: str | None, slopes: Mapping[str, Slope]) -> Verdict:
    if nearest is None or any(slope.value + SIGMAS * slope.error < WHOLE for slope in slopes.values()):
        return "other weights"
    if any(not slope.value - SIGMAS * slope.error > 0.5 for slope in slopes.values()):
        return "not decidable"
    return "attested" if distance <= limit else "other dtype"


def _slope(served: Tensor, first: Reference, second: Reference) -> Slope:
    """Slope through the origin of (served - second) on (first - second), with errors by token (White 1980).

    The mean of both folders' own rounding is a second regressor: a server's is correlated with it.
    """
    x, y = first.stored - second.stored, served - second.stored
    rounding = (first.computed - first.stored + second.computed - second.stored) / 2
    total = float((x * x).sum())
    if total == 0:
        return Slope(math.nan, math.inf)
    along = x
    if (size := float((rounding * rounding).sum())) > 0:
        along = x - float((x * rounding).sum()) / size * rounding  # Frisch, Waugh 1933
        y = y - float((y * rounding).sum()) / size * rounding
        total = float((along * along).sum())
    value = float((along * y).sum()) / total
    residuals = y - value * along
    count = len(x)
    # a floor keeps a perfect fit from claiming certainty: float32 kernels do not agree better than this
    error = math.sqrt(float((along * along * residuals * residuals).sum()) * count / max(1, count - 1)) / total
    return Slope(value, max(error, KERNELS / 10 / math.sqrt(total)))


def _tail(z: float) -> float:
    """One-sided normal probability beyond `z`."""
    return 0.5 * math.erfc(z / math.sqrt(2)) if not math.isnan(z) else 0.5
