"""Verdicts on a reward: gold answers that do not score, garbage that does, constants, errors, time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from covey.doctor.reward_audit.examination import Examination, Tried
from covey.evaluation.intervals import finite_mean

Level = Literal["FAIL", "WARN", "NOTE"]

_MOST_MISSED = 0.05
"""Share of rows that a check may miss before it counts: data sets have a few bad rows."""
_MOST_BY_CHANCE = 0.25
"""The same for texts that may hold the right answer, such as its own words in another order."""
_SHOWN = 3


@dataclass(frozen=True)
class Verdict:
    """A finding about a reward: a fault, or a remark."""

    level: Level
    check: str
    said: str
    facts: dict[str, Any] = field(default_factory=dict)


def judge(examination: Examination, *, slow_seconds: float = 0.5) -> list[Verdict]:
    """Every verdict on an examination, the worst first; none when nothing was found.

    A reward that takes more than `slow_seconds` a completion is slow.
    """
    checks: list[Callable[[Examination], Iterator[Verdict]]] = [
        _errors,
        _escapes,
        _constant,
        _gold,
        _garbage,
        _hedges,
        _too_long,
        _repeated,
        _abstains,
        lambda examination: _time(examination, slow_seconds),
        _form,
    ]
    verdicts = [verdict for check in checks for verdict in check(examination)]
    return sorted(verdicts, key=lambda verdict: ("FAIL", "WARN", "NOTE").index(verdict.level))


def _errors(examination: Examination) -> Iterator[Verdict]:
    failed = [tried for tried in examination.tried if tried.errors]
    if not failed:
        return
    on_gold = [tried for tried in failed if tried.probe.kind in ("gold", "given")]
    names = _join_names([tried.probe.name for tried in failed])
    first = (on_gold or failed)[0].errors[0]
    yield Verdict(
        "FAIL",
        "errors",
        f"raised or ran out of time on {sum(t.lost for t in failed)} completions ({names}); first: {first}",
        {"probes": [tried.probe.name for tried in failed], "first": first},
    )


def _too_long(examination: Examination) -> Iterator[Verdict]:
    unread = [tried.probe.name for tried in examination.tried if tried.too_long]
    if unread:
        sentence = f"does not score texts longer than its model reads ({_join_names(unread)}), nor will a run"
        yield Verdict("NOTE", "too_long", sentence, {"probes": unread})


def _escapes(examination: Examination) -> Iterator[Verdict]:
    if examination.ran_here:
        sentence = "ran a program out of a completion in this very process, where it can do anything; use the reward 'code', or a sandbox"
        yield Verdict("FAIL", "escape", sentence)
    elif examination.wrote_here:
        sentence = "a program out of a completion could write to this machine's temporary files; use the reward 'code', or a sandbox"
        yield Verdict("FAIL", "escape", sentence)


def _constant(examination: Examination) -> Iterator[Verdict]:
    scores = [score for tried in examination.tried for score in tried.finite]
    if not scores:
        yield Verdict("FAIL", "constant", "scored nothing at all: it abstained from or failed on every completion")
    elif max(scores) - min(scores) < 1e-9:
        yield Verdict("FAIL", "constant", f"gives {scores[0]:.4g} to everything, so nothing can be learnt from it")


def _gold(examination: Examination) -> Iterator[Verdict]:
    if not examination.reads_gold:
        return
    gold, wrong = examination.scores("gold"), examination.scores("wrong")
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(gold, wrong, strict=True)) if not math.isnan(a)]
    missed = [i for i, a, b in pairs if not math.isnan(b) and a <= b]
    if missed and len(missed) > _MOST_MISSED * len(pairs):
        shown = "; ".join(f"row {i}: {_brief(examination.rows[i].gold or '')}" for i in missed[:_SHOWN])
        yield Verdict(
            "FAIL",
            "gold",
            f"the right answer scores no more than a wrong one in {len(missed)} of {len(pairs)} rows, {examination.wording} ({shown})",
            {"rows": missed},
        )
    elif missed:
        yield Verdict(
            "WARN", "gold", f"the right answer scores no more than a wrong one in rows {missed}", {"rows": missed}
        )
    deaf = [
        t.probe.name
        for t in examination.of("gold")
        if t.probe.name != examination.wording
        and t.finite
        and t.mean <= finite_mean(wrong) + 0.1 * (finite_mean(gold) - finite_mean(wrong))
    ]
    if deaf:
        yield Verdict(
            "NOTE",
            "wordings",
            f"a right answer is read {examination.wording}, not {_join_names(deaf)}; say in the prompt how to answer",
            {"read": examination.wording, "not_read": deaf},
        )


def _garbage(examination: Examination) -> Iterator[Verdict]:
    if not examination.reads_gold:
        return
    for tried in examination.of("garbage"):
        paid = _paid(examination, tried)
        by_chance = tried.probe.name in ("the prompt again", "cut before the answer", "gold words, shuffled")
        if len(paid) <= (_MOST_BY_CHANCE if by_chance else _MOST_MISSED) * max(tried.size, 1):
            continue
        if by_chance:
            sentence = (
                f"{tried.probe.name!r} earns half a right answer's mark or more in {len(paid)} of {tried.size} rows"
            )
            yield Verdict("WARN", "garbage", sentence, {"probe": tried.probe.name, "rows": paid})
        else:
            sentence = f"garbage earns half a right answer's mark or more: {tried.probe.name!r}, {len(paid)} of {tried.size} rows"
            yield Verdict("FAIL", "garbage", sentence, {"probe": tried.probe.name, "rows": paid})


def _hedges(examination: Examination) -> Iterator[Verdict]:
    if not examination.reads_gold:
        return
    cheats = ("right, then wrong", "right or wrong", "a hundred candidates", "candidates in a list")
    full = [t for t in examination.of("hedge") if len(_paid(examination, t, share=0.9)) > 0.5 * max(t.size, 1)]
    bad = [t.probe.name for t in full if t.probe.name in cheats]
    if bad:
        yield Verdict(
            "WARN", "hackable", f"pays a text in full that names wrong answers too: {_join_names(bad)}", {"probes": bad}
        )
    above = [
        t.probe.name
        for t in examination.of("hedge")
        if t.finite and t.mean > finite_mean(examination.scores("gold")) + 1e-6
    ]
    if above:
        yield Verdict(
            "WARN", "hackable", f"pays more than for the plain right answer: {_join_names(above)}", {"probes": above}
        )
    free = [t.probe.name for t in full if t.probe.name not in (*cheats, *above)]
    if free:
        sentence = f"does not mind {_join_names(free)}; a reward for length, format or repetition beside it would"
        yield Verdict("NOTE", "length", sentence, {"probes": free})


def _repeated(examination: Examination) -> Iterator[Verdict]:
    if examination.moved:
        yield Verdict(
            "FAIL",
            "nondeterministic",
            f"scored the same completions otherwise when asked again: {_join_names(examination.moved)}",
        )
    if examination.reordered:
        sentence = f"scores depend on the order of the batch: {_join_names(examination.reordered)}"
        yield Verdict("WARN", "nondeterministic", sentence, {"probes": examination.reordered})


def _abstains(examination: Examination) -> Iterator[Verdict]:
    main = examination.of("gold", examination.wording) if examination.wording else examination.of("given")
    for tried in main:
        texts = zip(tried.probe.texts, tried.scores, strict=True)
        none = [i for i, (text, score) in enumerate(texts) if text is not None and math.isnan(score)]
        if none and not tried.errors and len(none) > _MOST_MISSED * tried.size:
            sentence = (
                f"abstains from its own right answers in {len(none)} of {tried.size} rows (such as row {none[0]})"
            )
            yield Verdict("WARN", "abstains", sentence, {"rows": none})
    without = [i for i, row in enumerate(examination.rows) if row.gold is None]
    if examination.wording and without:
        yield Verdict(
            "WARN",
            "abstains",
            f"{len(without)} of {len(examination.rows)} rows have no gold answer (such as row {without[0]})",
        )


def _time(examination: Examination, limit: float) -> Iterator[Verdict]:
    ordinary = [t for t in examination.tried if t.probe.kind in ("gold", "wrong", "given") and t.size]
    if not ordinary:
        return
    usual = sorted(t.seconds / t.size for t in ordinary)[len(ordinary) // 2]
    if usual > limit:
        yield Verdict(
            "WARN",
            "slow",
            f"takes {usual:.2g} s a completion; streams=True hides it behind the rollout",
            {"seconds": usual},
        )
    slow = [t for t in examination.tried if t.size and t.seconds / t.size > max(limit, 20 * usual)]
    if slow:
        worst = max(slow, key=lambda t: t.seconds / t.size)
        sentence = f"{worst.probe.name!r} takes {worst.seconds / worst.size:.2g} s a completion, others {usual:.2g} s"
        yield Verdict("WARN", "slow", sentence, {"probe": worst.probe.name, "seconds": worst.seconds / worst.size})


def _form(examination: Examination) -> Iterator[Verdict]:
    """Verdicts on a reward that ignores the gold answer: its scores for completions without an answer."""
    if examination.reads_gold:
        return
    scores = [score for tried in examination.tried for score in tried.finite]
    if not scores or max(scores) - min(scores) < 1e-9:
        return
    top = max(scores)
    free = [t.probe.name for t in examination.of("garbage") if t.finite and t.mean >= top - 1e-9]
    why = "right and wrong answers score alike" if examination.wording else "there are no gold answers to compare with"
    sentence = f"judges form alone, as far as can be seen: {why}"
    if free:
        sentence += f"; its highest score goes to {_join_names(free)} too, so use it beside a reward for being right"
    yield Verdict("NOTE", "form", sentence, {"highest_for": free})


def _paid(examination: Examination, tried: Tried, share: float = 0.5) -> list[int]:
    """Rows where a probe earns more than `share` of the way from the wrong answer's score to the right one's."""
    rows = enumerate(zip(tried.scores, examination.scores("gold"), examination.scores("wrong"), strict=True))
    return [i for i, (score, right, wrong) in rows if right > wrong and score >= wrong + share * (right - wrong)]


def _join_names(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:4]))
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else "..." + line[-57:])
