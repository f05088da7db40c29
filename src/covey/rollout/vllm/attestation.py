"""Attestation: a check, by log-probabilities and not by a label, that a server computes with the weights that the trainer sent.

A probe of fixed tokens is scored by the server and by the trainer. Three questions, from the cheapest:

* *moved*: after an update that changes the probe, is the server's answer different at all? On a bitwise deterministic server
  an equal answer means that nothing arrived.
* *right*: the server's change of log-probabilities regressed on the trainer's. The slope is 1 for the pushed weights and 0 for the
  old ones; updates are pooled until the confidence interval excludes one.
* *near*: distance of the server's log-probabilities from the trainer's, compared with that of the first updates.

And between updates: an answer that differs from the last one means that another process wrote weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from covey.errors import AttestationError
from covey.models import evaluating
from covey.models.modalities import forget_positions, whole_inputs
from covey.process.sharding import compute_device
from covey.process.world import autocast
from covey.types import Max, Mean, Metric, Prompt

PROBE_TOKENS = 64
TOP = 20
"""Likeliest tokens of each position that are compared, in addition to the probe's own."""
SIGMAS = 7.0
"""Standard errors on each side of the slope's interval: no false alarm in thousands of updates, also with few clusters."""
SLACK = 0.25
"""Distance of the interval from 1 beyond which the weights count as wrong."""
FARTHEST = 0.3
"""Tolerated mean difference in nats due to bfloat16, quantized caches and kernels; measured: 0.01."""
FARTHEST_FLOAT32 = 0.003
"""The same where server and trainer compute in float32; measured: 1e-6."""
TIMES_FARTHER = 5.0
"""Factor on the first updates' difference beyond which the weights count as wrong."""
SMALLEST_STEP = 2e-3
"""Difference in nats below which growth is ignored: float32 servers start near 0."""

Verdict = Literal["right", "wrong", "not decidable yet"]


@dataclass(frozen=True, eq=False)
class Answer:
    """The server's log-probabilities of a probe: which (position, token) pairs, and their values [K] in float64."""

    keys: tuple[tuple[int, int], ...]
    values: Tensor

    @staticmethod
    def of(prompt_logprobs: Any) -> Answer:
        """From `prompt_logprobs`: a list with None first, then one mapping a position. Raises AttestationError for anything else."""
        try:
            entries = [
                (position, int(token), float(entry["logprob"]))
                for position, tokens in enumerate(prompt_logprobs)
                for token, entry in (tokens or {}).items()
            ]
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise AttestationError(f"The server's answer to the probe cannot be read: {error}.") from error
        entries.sort()
        if not entries or not all(math.isfinite(value) for *_, value in entries):
            raise AttestationError("The server's answer to the probe holds no finite log-probabilities.")
        keys = tuple((position, token) for position, token, _ in entries)
        return Answer(keys, torch.tensor([value for *_, value in entries], dtype=torch.float64))

    def equals(self, other: Answer) -> bool:
        """True if all values are bitwise equal."""
        return self.keys == other.keys and torch.equal(self.values, other.values)

    def distance(self, logp: Tensor) -> float:
        """Mean absolute difference in nats from the trainer's log-probabilities [L - 1, V]."""
        return float((self.values - _at(logp, self.keys)).abs().mean())


def _codes(keys: Sequence[tuple[int, int]]) -> Tensor:
    """[K] int64, ascending as the keys are: one number a (position, token) pair."""
    places = torch.tensor(keys)
    return places[:, 0] * 2**32 + places[:, 1]


def _at(logp: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    places = torch.tensor(keys)  # position p is predicted by row p - 1
    return logp[places[:, 0] - 1, places[:, 1]].double()


@dataclass(frozen=True)
class Slope:
    """Regression through the origin of the server's change y on the trainer's x, pooled over updates, with clustered errors.

    For each position p: x_p = sum of x^2, y_p = sum of x y. The slope is sum y_p / sum x_p; its variance, clustered by position
    (Liang and Zeger 1986), sum (y_p - b x_p)^2 / (sum x_p)^2. Five sums hold it all.
    """

    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    clusters: int = 0

    def with_update(self, before: Answer, after: Answer, logp_before: Tensor, logp_after: Tensor) -> Slope:
        """The regression with one more update; pairs that only one answer has are left out."""
        ours, theirs = _codes(after.keys), _codes(before.keys)
        is_common = torch.isin(ours, theirs)
        if not bool(is_common.any()):
            return self
        places = torch.tensor(after.keys)[is_common]
        change = after.values[is_common] - before.values[torch.searchsorted(theirs, ours[is_common])]
        rows = (places[:, 0] - 1, places[:, 1])
        expected = logp_after[rows].double() - logp_before[rows].double()
        positions = places[:, 0]
        zeros = torch.zeros(int(positions.max()) + 1, dtype=torch.float64)
        xs, ys = zeros.index_add(0, positions, expected**2), zeros.index_add(0, positions, expected * change)
        return Slope(
            self.x + float(xs.sum()),
            self.y + float(ys.sum()),
            self.xx + float((xs**2).sum()),
            self.xy + float((xs * ys).sum()),
            self.yy + float((ys**2).sum()),
            self.clusters + int((xs > 0).sum()),
        )

    @property
    def value(self) -> float:
        return self.y / self.x if self.x > 0 else math.nan

    @property
    def error(self) -> float:
        """Standard error, clustered by position; infinite with fewer than 20 clusters."""
        if self.x <= 0 or self.clusters < 20:
            return math.inf
        b = self.value
        spread = max(0.0, self.yy - 2 * b * self.xy + b * b * self.xx)
        return math.sqrt(spread * self.clusters / (self.clusters - 1)) / self.x

    def verdict(self, *, lowest: float = 1 - SLACK) -> Verdict:
        """Verdict `wrong` if the interval lies below `lowest` or above 1.25, `right` if it excludes 0 and lies within these bounds."""
        low, high = self.value - SIGMAS * self.error, self.value + SIGMAS * self.error
        if not math.isfinite(low):
            return "not decidable yet"
        if high < lowest or low > 1 + SLACK:
            return "wrong"
        return "right" if low > 0 and high - low < 2 else "not decidable yet"


@dataclass(frozen=True)
class AttestationResult:
    """Outcome of the attestation of one update."""

    moved: bool | None
    """True if the answer changed. None: the update is too small to tell, or the server is not deterministic."""
    right: Verdict
    slope: float
    distance: float
    """Nats between the server's log-probabilities and the trainer's."""
    exact: bool | None = None
    """True if the digests are equal; None: the server has no digests."""

    def metrics(self) -> dict[str, Metric]:
        flags = {"moved": self.moved, "exact": self.exact, "right": {"right": True, "wrong": False}.get(self.right)}
        metrics: dict[str, Metric] = {
            f"vllm/{name}": Mean(float(is_so), 1) for name, is_so in flags.items() if is_so is not None
        }
        metrics["vllm/probe_difference"] = Max(self.distance)
        if math.isfinite(self.slope):
            metrics["vllm/probe_slope"] = Mean(self.slope, 1)
        return metrics


@dataclass(eq=False)
class Attestation:
    """Compares the server with the trainer at each update, and with itself between updates. Holds the last answers of both."""

    is_exact_trainer: bool = True
    """True if the trainer's probe is in float32: rounding in it would pull the slope towards 0."""
    is_float32: bool = False
    """True if both compute in float32."""
    is_repeatable: bool | None = None
    """True if the server answers the same probe twice with the same bits; None: not known yet."""
    last: Answer | None = None
    logp: Tensor | None = None
    """[L - 1, V] float32, the trainer's log-probabilities at the last update."""
    rounded: Tensor | None = None
    """`logp` computed in the server's dtype."""
    slope: Slope = field(default_factory=Slope)
    distances: list[float] = field(default_factory=list)
    """Distances of the first updates, the baseline for later ones."""

    def learn_repeatability(self, first: Answer, second: Answer) -> None:
        """Compare two answers with the same weights. A server that ever differs is no longer expected to be bitwise deterministic."""
        self.is_repeatable = self.is_repeatable is not False and first.equals(second)

    def check_untouched(self, now: Answer, again: Answer, is_exact: Callable[[], bool | None] = lambda: None) -> None:
        """Check that the weights did not change between updates, by two answers in a row. Raises AttestationError if they did.

        `is_exact`: True if digests prove the weights of the last update, so that only the last bits can differ; None: there are none.
        """
        if self.last is None or now.equals(self.last) or again.equals(self.last):
            return
        exact = is_exact()
        if exact or not now.equals(again):  # concurrent requests change the batch, and with it the last bits
            self.is_repeatable = False
        if self.is_repeatable is False and exact is not False:
            near = self.logp is not None and now.distance(self.logp) <= self.farthest()
            if near:
                return
        raise AttestationError(
            "The server's answer to the probe has changed since the last update, though this run sent nothing: another process "
            "writes weights to it, or it was started again. Give every run a server of its own."
        )

    def check_update(
        self, after: Answer, logp: Tensor, rounded: Tensor, exact: bool | None = None
    ) -> AttestationResult:
        """Attest an update: `after` is the server's, `logp` and `rounded` are the trainer's. Raises AttestationError if they disagree."""
        before, logp_before, rounded_before = self.last, self.logp, self.rounded
        moved = None
        if before is not None and rounded_before is not None and logp_before is not None:
            expects = float((rounded != rounded_before).double().mean()) >= 0.1
            moved = not after.equals(before) if expects and self.is_repeatable is not False else None
            self.slope = self._pooled(before, after, logp_before, logp)
        distance = after.distance(logp)
        verdict = self.slope.verdict(lowest=1 - SLACK if self.is_exact_trainer else SLACK)
        seen = AttestationResult(moved, verdict, self.slope.value, distance, exact)
        limit = self.farthest()
        self.last, self.logp, self.rounded = after, logp, rounded
        if moved is False:
            raise AttestationError(
                "The update moved nothing: the server answers the probe with the same bits as before, and the weights that were "
                "sent do not. Start the server again with covey serve-vllm, or use vllm_transport='directory'."
            )
        if verdict == "wrong":
            raise AttestationError(
                f"The server does not follow the weights that are sent: its log-probabilities move {self.slope.value:.2f} "
                f"(± {SIGMAS * self.slope.error:.2f}) times as far as the trainer's, where 1 is right and 0 means old weights."
            )
        if distance > limit:
            raise AttestationError(
                f"The server answers with other weights: its log-probabilities of the probe are {distance:.3g} nats from the "
                f"trainer's, where {limit:.3g} is expected."
            )
        if len(self.distances) < 5:
            self.distances.append(distance)
        return seen

    def _pooled(self, before: Answer, after: Answer, logp_before: Tensor, logp_after: Tensor) -> Slope:
        """Slope pooled over recent updates, or of the last one if that alone is decisive."""
        alone = Slope().with_update(before, after, logp_before, logp_after)
        if alone.verdict() != "not decidable yet":
            return alone
        past = self.slope if self.slope.verdict() == "not decidable yet" else Slope()
        return past.with_update(before, after, logp_before, logp_after)

    def farthest(self) -> float:
        """Largest accepted mean difference: a multiple of those of the first updates, which are bounded themselves."""
        most = FARTHEST_FLOAT32 if self.is_float32 else FARTHEST
        if not self.distances:
            return most
        usual = sorted(self.distances)[len(self.distances) // 2]
        return min(most, max(TIMES_FARTHER * usual, SMALLEST_STEP))

    def forget(self) -> None:
        """Discard all earlier answers, after a broken update."""
        self.last = self.logp = self.rounded = None
        self.slope = Slope()


def check_replicas(answers: Sequence[Answer], before: Answer | None, *, is_repeatable: bool | None) -> None:
    """Check that all replicas of a server answer alike. Raises AttestationError if some still answer as before the update."""
    if before is None or is_repeatable is False:
        return
    stuck = [rank for rank, answer in enumerate(answers) if answer.equals(before)]
    if stuck and len(stuck) < len(answers):
        raise AttestationError(
            f"The update reached some replicas of the server only: replica {stuck[0]} of {len(answers)} still answers with the "
            "weights before it."
        )


def probe_ids(vocabulary: int, length: int = PROBE_TOKENS) -> tuple[int, ...]:
    """The probe: tokens drawn once from a fixed seed over the whole vocabulary, which no prompt of a run resembles."""
    generator = torch.Generator().manual_seed(20261124)
    return tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())


@torch.no_grad()
def trainer_logprobs(policy: nn.Module, prompt: Prompt, dtype: torch.dtype | None = None) -> Tensor:
    """[L - 1, V] float32 on the CPU: the policy's log-probabilities after each token but the last, under autocast to `dtype`."""
    device = compute_device(next(policy.parameters()))
    with evaluating(policy), autocast(device, dtype):
        inputs = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in whole_inputs(policy, prompt).items()
        }
        logits = policy(**inputs).logits[0, :-1]
    if prompt.media is not None:
        forget_positions(policy)
    logprobs: Tensor = logits.float().log_softmax(-1).cpu()
    return logprobs
