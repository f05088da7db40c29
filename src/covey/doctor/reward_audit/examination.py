"""A reward tried on a data set's own answers, on wrong ones and on attempts to cheat, before a run is paid for."""

from __future__ import annotations

import builtins
import math
import re
import time
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from covey.doctor.reward_audit.probes import MARK, Probe, Row, garbage, gold_probes, hedges, mark_file, programs
from covey.errors import RewardError, TooLongError
from covey.evaluation.intervals import finite_mean
from covey.process.counting import counted
from covey.rewards.contract import RewardSpec
from covey.rewards.scorer import Scorer
from covey.types import Completion, Group

_AT_ONCE = 64
"""Completions of one call at most, about as many as in training: the time limit is that of a call."""
_PIECE = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Tried:
    """Scores of a reward for one probe, one a row, NaN where it abstained, failed or there was nothing to score."""

    probe: Probe
    scores: list[float]
    seconds: float
    errors: list[str] = field(default_factory=list)
    """Errors, one sentence each."""
    lost: int = 0
    """Completions that got no score for it."""
    too_long: int = 0
    """Completions that got no score because the reward's model reads no text as long; no error for garbage and hedges."""

    @property
    def size(self) -> int:
        return sum(text is not None for text in self.probe.texts)

    @property
    def finite(self) -> list[float]:
        return [score for score in self.scores if not math.isnan(score)]

    @property
    def mean(self) -> float:
        return finite_mean(self.scores)


@dataclass(frozen=True)
class Examination:
    """Everything that was tried with one reward."""

    name: str
    rows: list[Row]
    tried: list[Tried]
    wording: str | None = None
    """The wording of the gold answer that scores furthest above a wrong one; `None` without gold answers."""
    reads_gold: bool = False
    """True if a right answer ever got another score when paired with another row's prompt and columns."""
    moved: list[str] = field(default_factory=list)
    """Probes whose scores were others the second time."""
    reordered: list[str] = field(default_factory=list)
    """Probes whose scores were others when the rows came in another order, and in that order alone."""
    ran_here: bool = False
    """True if a program in a completion ran in this process."""
    wrote_here: bool = False
    """True if a program in a completion could write to this machine's temporary folder."""

    def of(self, kind: str, name: str | None = None) -> list[Tried]:
        return [t for t in self.tried if t.probe.kind == kind and name in (None, t.probe.name)]

    def scores(self, kind: str) -> list[float]:
        """A score a row of the gold answer in its best wording, or of the wrong one in the same."""
        trials = self.of(kind, self.wording) if self.wording is not None else []
        return trials[0].scores if trials else [math.nan] * len(self.rows)


def examine(
    spec: RewardSpec, rows: Sequence[Row], *, timeout_seconds: float | None = 20.0, without: Sequence[str] = ()
) -> Examination:
    """Try a reward. A probe is one call with one completion of every row, so that what fails or is slow has a name.
    `without` names garbage to leave out.

    Raises RewardError for errors that no retry can fix: a wrong number of values, values that are no numbers.
    """
    session = _Session(replace(spec, weight=1.0), list(rows), timeout_seconds)
    try:
        session.attempt(Probe("warm-up", "garbage", [""] * len(rows)))  # loads what the first call loads
        trials = [
            session.attempt(probe) for probe in counted([*gold_probes(rows), *programs(rows)], "calls, right and wrong")
        ]
        wording = _best_wording(trials)
        reads_gold = wording is not None and _reads_gold(session, trials, wording)
        dataset_probe = Probe("given completions", "given", [row.completion for row in rows])
        rest = [*([dataset_probe] if any(row.completion for row in rows) else [])]
        rest += [probe for probe in garbage(rows) if probe.name not in without]
        rest = [*(hedges(rows, wording) if wording else []), *rest]
        trials += [session.attempt(probe) for probe in counted(rest, "calls, garbage")]
        moved, reordered = _changes(session, trials, wording)
    finally:
        session.close()
        ran_here, wrote_here = _take_marks()
    return Examination(spec.name, list(rows), trials, wording, reads_gold, moved, reordered, ran_here, wrote_here)


def _take_marks() -> tuple[bool, bool]:
    """(ran_here, wrote_here): marks that probe programs left in this process and on this machine; both are removed."""
    ran_here, wrote_here = hasattr(builtins, MARK), mark_file().exists()
    if ran_here:
        delattr(builtins, MARK)
    mark_file().unlink(missing_ok=True)
    return ran_here, wrote_here


def _best_wording(trials: Sequence[Tried]) -> str | None:
    """The wording whose right answers most often beat their wrong twins, then the one with the highest mean."""
    wrong = {t.probe.name: t.scores for t in trials if t.probe.kind == "wrong"}
    ranked: list[tuple[int, float, int, str]] = []
    for trial in (t for t in trials if t.probe.kind == "gold"):
        pairs = zip(trial.scores, wrong.get(trial.probe.name, []), strict=False)
        scored = [(a, b) for a, b in pairs if not (math.isnan(a) or math.isnan(b))]
        wins = sum(a > b for a, b in scored)
        ranked.append((wins, -math.inf if math.isnan(trial.mean) else trial.mean, -len(ranked), trial.probe.name))
    return max(ranked)[3] if ranked else None


def _reads_gold(session: _Session, trials: Sequence[Tried], wording: str) -> bool:
    """True if the same right answers get other scores when paired with the prompts and columns of other rows.

    Where every row has the same answer: True if they score other than wrong ones in the same words.
    """
    gold = next(t for t in trials if t.probe.kind == "gold" and t.probe.name == wording)
    others = [_partner(session.rows, i) for i in range(len(session.rows))]
    if all(other is None for other in others):
        wrong = next((t for t in trials if t.probe.kind == "wrong" and t.probe.name == wording), gold)
        return not _equal(gold.scores, wrong.scores)
    texts = [None if other is None else text for text, other in zip(gold.probe.texts, others, strict=True)]
    exchanged = [session.rows[other or 0] for other in others]
    with closing(_Session(session.spec, exchanged, session.timeout_seconds)) as other_session:
        again = other_session.attempt(Probe(wording, "gold", texts)).scores
    pairs = [(a, b) for a, b, text in zip(gold.scores, again, texts, strict=True) if text is not None]
    return not _equal([a for a, _ in pairs], [b for _, b in pairs])


def _partner(rows: Sequence[Row], index: int) -> int | None:
    """The row that the wrong answer of this one comes from."""
    if rows[index].gold is None or rows[index].other is None:
        return None
    return next((i for i, row in enumerate(rows) if row.gold == rows[index].other), None)


def _changes(session: _Session, trials: Sequence[Tried], wording: str | None) -> tuple[list[str], list[str]]:
    """Names of probes that scored otherwise when repeated, and of those that did so in another order alone."""
    moved, reordered = [], []
    for trial in trials:
        is_main = trial.probe.name == wording or trial.probe.kind == "given"
        if not (is_main or trial.probe.name in ("a refusal", "the prompt again")) or trial.errors:
            continue
        again, backwards = session.attempt(trial.probe).scores, session.attempt(trial.probe, backwards=True).scores
        if not _equal(trial.scores, again):
            moved.append(trial.probe.name)
        elif not _equal(trial.scores, backwards):
            reordered.append(trial.probe.name)
    return list(dict.fromkeys(moved)), list(dict.fromkeys(reordered))


def _equal(first: Sequence[float], second: Sequence[float]) -> bool:
    return all(
        (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5)
        for a, b in zip(first, second, strict=True)
    )


class _Session:
    """One reward and its rows. Scores are not cached, not even of a reward declared pure."""

    def __init__(self, spec: RewardSpec, rows: list[Row], timeout_seconds: float | None) -> None:
        self.spec, self.rows, self.timeout_seconds = spec, rows, timeout_seconds
        uncached = replace(spec, call_options=replace(spec.how, pure=False))
        self.scorer = Scorer([uncached], timeout_seconds=timeout_seconds, error_limit=10**9)

    def attempt(self, probe: Probe, *, backwards: bool = False) -> Tried:
        """Score one completion a row: alone, or in a group with a wrong answer for a reward that is called prompt by prompt."""
        held = [i for i, text in enumerate(probe.texts) if text is not None]
        order = held[::-1] if backwards else held
        groups = [Group(prompt=self.rows[i].prompt, completions=self._group(probe.texts[i] or "", i)) for i in order]
        started = time.perf_counter()
        scored = [
            group
            for cut in range(0, len(groups), _AT_ONCE)
            for group in self.scorer.score(groups[cut : cut + _AT_ONCE])
        ]
        seconds = time.perf_counter() - started
        scores, errors, lost, too_long = [math.nan] * len(self.rows), [], 0, 0
        for i, group in zip(order, scored, strict=True):
            if group.rewards is None:
                raise RewardError(f"the reward {self.spec.name!r} gave a prompt no scores.")
            scores[i] = float(group.rewards[0, 0])
            for event in (event for event in group.events if event.kind.startswith("reward")):
                count = int(event.details.get("completions", 1))
                if probe.kind in ("garbage", "hedge") and event.details.get("error") == TooLongError.__name__:
                    too_long += count
                    continue
                errors.append(f"row {i}: {event.said}")
                lost += count
        return Tried(probe, scores, seconds, errors, lost, too_long)

    def _group(self, text: str, row: int) -> tuple[Completion, ...]:
        if self.spec.how.unit != "group":
            return (_completion(text),)
        wrong = self.rows[row].wrong
        return (_completion(text), _completion(f"I suppose it is {wrong}." if wrong else "I do not know."))

    def close(self) -> None:
        self.scorer.close()


@lru_cache(maxsize=256)
def _completion(text: str) -> Completion:
    """A completion whose ids are made up: one a word or sign, the same for the same word."""
    ids = [zlib.crc32(piece.encode(errors="surrogatepass")) % 50_000 for piece in _PIECE.findall(text)]
    return Completion(token_ids=torch.tensor(ids, dtype=torch.int64), text=text, finish="stop")
