"""Checks of one row: its own faults, and the features for comparison with other rows."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from covey.data.prompts import check_prompt, encode_chat
from covey.doctor.data_check.encoding import is_lossy, repaired_row
from covey.doctor.data_check.findings import Findings
from covey.doctor.data_check.languages import language_of
from covey.doctor.data_check.ngrams import text_of
from covey.doctor.data_check.settings import Settings
from covey.doctor.data_check.spill import Spill
from covey.errors import DataError
from covey.rewards.builtin.answers import gold_answer, is_plain, number

_SIGN = re.compile(r"[^\w\s]|_")
_MOST_SIGNS = 0.5
_FEWEST_CHARACTERS = 40
"""Below, the share of signs says nothing: `3 + 4 = ?` is a fine prompt."""
LONGEST_VALUE = 100
"""Characters up to which two answers that differ contradict each other; two programs or essays that differ need not."""
_LEAKED = 24
"""Characters from which an answer that stands in its prompt is no chance, nor one of the choices."""


class Traits:
    """Features of every row that has a prompt, for comparison with others: on disk, with counts."""

    def __init__(self) -> None:
        self.rows = Spill([("row", "<i8"), ("characters", "<i8"), ("answer", "<i1"), ("language", "<i2")])
        """`answer` is 1: a number, 0: another answer, -1: none; `language` a place in `codes`."""
        self.codes: list[str | None] = []
        self.characters, self.tokens = Counter[int](), Counter[int]()
        """How many rows have so many; `tokens` is empty without a tokenizer."""
        self.languages = Counter[str | None]()

    def add(self, row: int, characters: int, tokens: int | None, answer: int, language: str | None) -> None:
        """Take a row."""
        if language not in self.languages:
            self.codes.append(language)
        self.languages[language] += 1
        self.characters[characters] += 1
        if tokens is not None:
            self.tokens[tokens] += 1
        self.rows.add((row, characters, answer, self.codes.index(language)))


@dataclass(frozen=True)
class Looked:
    """Features of a row for comparison with other rows."""

    row: int
    text: str
    answer: int
    """The same for the same answer."""


class Looker:
    """Checks rows one by one and records the findings."""

    def __init__(self, settings: Settings, answer_column: str | None, findings: Findings, traits: Traits) -> None:
        self._settings, self._answer_column = settings, answer_column
        self._findings, self.traits = findings, traits

    def look(self, number_: int, row: Mapping[str, Any]) -> Looked | None:
        """The row for comparing it, or None when it has no prompt to compare."""
        mended, faults = repaired_row(dict(row), self._settings.mended)
        for fault in faults:
            self._findings.add(fault, number_)
        prompt = mended.get(self._settings.prompt_column)
        try:
            check_prompt(prompt, "")
        except DataError:  # its sentence is the kind's
            self._findings.add("no_prompt", number_)
            return None
        text = text_of(prompt)
        if is_lossy(text):
            self._findings.add("lost", number_)
        for kind in personal(text):
            self._findings.add(kind, number_)
        signs = len(_SIGN.findall(text))
        if len(text) >= _FEWEST_CHARACTERS and signs > _MOST_SIGNS * len(text):
            self._findings.add("symbols", number_, amount=signs / len(text))
        answer, kind_of_answer = self._answer(number_, mended, text)
        self.traits.add(number_, len(text), self._tokens(number_, prompt), kind_of_answer, language_of(text))
        return Looked(number_, text, answer)

    def _answer(self, number_: int, row: Mapping[str, Any], text: str) -> tuple[int, int]:
        """The answer as a number, 0 where the data set has no answers; and its kind in `Traits`."""
        if self._answer_column is None:
            return 0, -1
        gold = answer_of(row, self._answer_column)
        if not gold:
            self._findings.add("no_answer", number_)
            return 1, -1
        if len(gold) >= _LEAKED and gold in text:
            self._findings.add("leak", number_)
        exact = number(gold)
        if self._settings.answers == "math" and not _parses(gold):
            self._findings.add("odd_answer", number_)
        if exact is None and (self._settings.answers == "text" or len(gold) > LONGEST_VALUE):
            return 1, int(exact is not None)
        plain = " ".join(gold.split()).casefold() if exact is None else str(exact)
        return xxhash.xxh3_64_intdigest(plain.encode("utf-8", "surrogatepass")) | 1, int(exact is not None)

    def _tokens(self, number_: int, prompt: Any) -> int | None:
        tokenizer, most = self._settings.tokenizer, self._settings.max_prompt_length
        if tokenizer is None or most is None:
            return None
        if isinstance(prompt, str):
            count = len(tokenizer(text=prompt)["input_ids"])
        else:
            try:
                count = len(encode_chat(prompt, f"Row {number_}", tokenizer, {}))
            except DataError:  # its sentence is the kind's
                self._findings.add("template", number_)
                return None
        if count > most:
            self._findings.add("too_long", number_, amount=count - most)
        return count


def answer_of(row: Mapping[str, Any], column: str | None) -> str:
    """The gold answer as the rewards read it; empty where there is none."""
    value = None if column is None else row.get(column)
    return "" if value is None else gold_answer(str(value))


def _parses(gold: str) -> bool:
    """True if the verifier parses a value in an answer. An unparsed text equals only itself, a value also itself in
    brackets or times one."""
    if is_plain(gold):
        return True
    from covey.rewards.builtin import verify

    is_equal = verify.is_equal
    spellings = (f"\\left({gold}\\right)", f"1 \\cdot {gold}")
    return any(is_equal(f"\\boxed{{{gold}}}", f"\\boxed{{{spelling}}}") for spelling in spellings)


_EMAIL = re.compile(r"\b[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")
_PHONE = re.compile(
    r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"
    r"|\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-]|\.\d)"
)
_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36}\b|\bhf_[A-Za-z]{34}\b"
    r"|\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{20,200}\b|\bxox[abprs]-[A-Za-z0-9-]{10,100}\b|\bAIza[0-9A-Za-z_-]{35}\b"
    r"|\beyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{10,2000}"
)
_KEY_MARKS = ("-----BEGIN ", "AKIA", "gh", "hf_", "sk-", "xox", "AIza", "eyJ")
_CARD = re.compile(r"(?<![\d.-])\d(?:[ -]?\d){12,18}(?![\d.-])")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b")


def personal(text: str) -> tuple[str, ...]:
    """The kinds of personal data that the text seems to hold: `email`, `phone`, `key`, `card`, `iban`.

    >>> personal("Write to ada@example.org, or call +44 20 7946 0958."), personal("2024-01-02, 3.14159 and 555 apples")
    (('email', 'phone'), ())
    """
    has_one = {  # a sign that each must have is found sooner than the whole
        "email": "@" in text and _EMAIL.search(text),
        "phone": any(sign in text for sign in "+-.(") and _PHONE.search(text),
        "key": any(mark in text for mark in _KEY_MARKS) and _KEY.search(text),
        "card": any(_luhn(re.sub(r"\D", "", match.group())) for match in _CARD.finditer(text)),
        "iban": any(_is_iban(match.group().replace(" ", "")) for match in _IBAN.finditer(text)),
    }
    return tuple(name for name, match in has_one.items() if match)


def _is_iban(plain: str) -> bool:
    """True if the check digits of an account's number are right (ISO 7064, mod 97-10)."""
    return int("".join(str(int(sign, 36)) for sign in plain[4:] + plain[:4])) % 97 == 1


def _luhn(digits: str) -> bool:
    """True if the Luhn check digit of a card number is right; a number of equal digits, such as zeros, is refused."""
    doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits))]
    return len(set(digits)) > 1 and sum(value - 9 * (value > 9) for value in doubled) % 10 == 0
