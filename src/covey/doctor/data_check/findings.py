"""Kinds of faults of a row, their fixes, and the rows they were found in."""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from covey.doctor.data_check.spill import Spill

_AS_OBJECTS = 10_000

Action = Literal["drop", "change", "look"]
"""Action of `covey data clean`: leave the row out, repair its text, or nothing, because only a person can judge."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault."""

    name: str
    title: str
    """Name in the table."""
    action: Action
    why: str
    """The end of "row 7 ..."; `{other}` names another row, `{amount}` is a figure."""
    fix: str

    @property
    def must_be_mended(self) -> bool:
        return self.action != "look"

    def reason(self, other: str = "", amount: float = math.nan) -> str:
        """`why` with its figures."""
        return self.why.format(other=other, amount=amount)


_ALL = (
    Kind(name="unreadable", title="rows that cannot be read", action="drop",
         why="is not a JSON object in UTF-8", fix="clean leaves them out; see what wrote them"),
    Kind(name="no_prompt", title="no usable prompt", action="drop",
         why="has no prompt, or one that is neither text nor chat messages", fix="clean leaves them out; or name the column with --prompt-column"),
    Kind(name="duplicate", title="duplicates", action="drop",
         why="has the prompt of {other}", fix="clean keeps the first"),
    Kind(name="disputed", title="same prompt, other answer", action="drop",
         why="has the prompt of {other}, but another answer", fix="correct the wrong one; clean leaves all of them out"),
    Kind(name="near_duplicate", title="near duplicates", action="drop",
         why="shares {amount:.2f} of its runs of words with {other}", fix="clean keeps the first; --near sets the share"),
    Kind(name="contaminated", title="evaluation questions", action="drop",
         why="shares {amount:.2f} of its words with {other}", fix="clean leaves them out; --overlap sets the share"),
    Kind(name="too_long", title="longer than the context", action="drop",
         why="loses {amount:.0f} tokens to the limit", fix="raise --max-prompt-length, shorten them, or clean leaves them out"),
    Kind(name="template", title="refused by the chat template", action="drop",
         why="is refused by the chat template", fix="mend the roles and their order; clean leaves them out"),
    Kind(name="no_answer", title="no answer", action="drop",
         why="has no answer, so no reward can be given", fix="fill them in; clean leaves them out"),
    Kind(name="odd_answer", title="answers that cannot be parsed", action="drop",
         why="has an answer that the verifier cannot parse", fix="mend them, or --answers text; clean leaves them out"),
    Kind(name="mojibake", title="text in the wrong encoding", action="change",
         why="has text that was read in the wrong encoding", fix="clean mends it"),
    Kind(name="controls", title="control or invisible characters", action="change",
         why="has control or invisible characters", fix="clean takes them out"),
    Kind(name="surrogates", title="halves of characters", action="change",
         why="has halves of characters", fix="clean joins them, or puts U+FFFD"),
    Kind(name="form", title="not in Unicode form NFC", action="change",
         why="is not in Unicode form NFC", fix="clean puts it into that form"),
    Kind(name="lost", title="lost characters (U+FFFD)", action="look",
         why="has characters that were lost before (U+FFFD)", fix="read the source again in its right encoding"),
    Kind(name="akin", title="evaluation questions renumbered", action="look",
         why="shares {amount:.2f} of its words with {other}, but has other numbers", fix="look at them: the test rewards having seen their form"),
    Kind(name="email", title="e-mail addresses", action="look",
         why="seems to hold an e-mail address", fix="look at them; mask what is a person's"),
    Kind(name="phone", title="telephone numbers", action="look",
         why="seems to hold a telephone number", fix="look at them; mask what is a person's"),
    Kind(name="key", title="keys and tokens", action="look",
         why="seems to hold a key or an access token", fix="withdraw the key, and mask it"),
    Kind(name="card", title="card numbers", action="look",
         why="seems to hold a card number", fix="look at them; mask what is a person's"),
    Kind(name="iban", title="bank accounts", action="look",
         why="seems to hold a bank account's number", fix="look at them; mask what is a person's"),
    Kind(name="language", title="in another language", action="look",
         why="is in another language than most rows", fix="filter by language if that is not wanted"),
    Kind(name="length", title="far longer or shorter than others", action="look",
         why="has {amount:.0f} characters, far from the others", fix="look at them: a wrong field, or a whole document"),
    Kind(name="symbols", title="more symbols than words", action="look",
         why="is mostly signs: {amount:.2f} of its characters", fix="look at them: markup, tables or rubbish"),
    Kind(name="leak", title="answer given away in the prompt", action="look",
         why="has its own answer in the prompt", fix="look at them: the reward may be had by copying"),
)  # fmt: skip

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}
"""By name, in the order of the table."""


class Findings:
    """Findings by kind, each with its row numbers; all but the last few are on disk."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Spill] = {}
        self._most = -1

    def add(self, kind: str, row: int, other: int = -1, amount: float = math.nan) -> None:
        """Add a finding for row `row`; `other` and `amount` fill in the kind's sentence."""
        if kind not in self._by_kind:
            self._by_kind[KINDS[kind].name] = Spill([("row", "<i8"), ("other", "<i8"), ("amount", "<f8")])
        self._by_kind[kind].add((row, other, amount))
        self._most = max(self._most, row)

    def drop(self, kind: str) -> None:
        """Forget a kind."""
        self._by_kind.pop(kind, None)

    def kinds(self) -> list[Kind]:
        """The kinds that were found, in the order of KINDS."""
        return [kind for name, kind in KINDS.items() if name in self._by_kind]

    def rows(self, kind: str) -> list[int]:
        """The numbers of the rows with this fault, in ascending order, all at once."""
        return [row for row, _, _ in self.of(kind)]

    def count(self, kind: str) -> int:
        """Number of rows with this fault."""
        return len(self._by_kind[kind]) if kind in self._by_kind else 0

    def of(self, kind: str) -> Iterator[tuple[int, int, float]]:
        """Row, other row and amount of each finding of a kind, by row."""
        if kind in self._by_kind:
            for part in self._by_kind[kind].by_number("row", self._most):
                for start in range(0, len(part), _AS_OBJECTS):
                    yield from part[start : start + _AS_OBJECTS].tolist()

    def by_row(self) -> Iterator[tuple[int, list[tuple[Kind, int, float]]]]:
        """Each row that has findings, in ascending order, with the kind, other row and amount of each."""
        merged = heapq.merge(*(self._with_kind(kind) for kind in self.kinds()), key=lambda entry: entry[0])
        for row, its in itertools.groupby(merged, key=lambda entry: entry[0]):
            yield row, [(kind, other, amount) for _, kind, other, amount in its]

    def _with_kind(self, kind: Kind) -> Iterator[tuple[int, Kind, int, float]]:
        for row, other, amount in self.of(kind.name):
            yield row, kind, other, amount
