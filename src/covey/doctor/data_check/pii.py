"""Personal data and secrets (addresses, card numbers, keys), found by patterns; a person judges the matches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

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
    return tuple(name for name, finds in _FINDERS.items() if finds(text))


def _has_email(text: str) -> bool:
    return "@" in text and _EMAIL.search(text) is not None


def _has_phone(text: str) -> bool:
    return ("+" in text or "-" in text or "." in text or "(" in text) and _PHONE.search(text) is not None


def _has_key(text: str) -> bool:
    return any(mark in text for mark in _KEY_MARKS) and _KEY.search(text) is not None


def _has_card(text: str) -> bool:
    return any(_luhn(re.sub(r"\D", "", match.group())) for match in _CARD.finditer(text))


def _has_iban(text: str) -> bool:
    """A number whose check digits are right (ISO 7064, mod 97-10)."""
    for match in _IBAN.finditer(text):
        plain = match.group().replace(" ", "")
        if int("".join(str(int(sign, 36)) for sign in plain[4:] + plain[:4])) % 97 == 1:
            return True
    return False


def _luhn(digits: str) -> bool:
    """True if the Luhn check digit of a card number is right; a number of equal digits, such as zeros, is refused."""
    doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits))]
    return len(set(digits)) > 1 and sum(value - 9 * (value > 9) for value in doubled) % 10 == 0


_FINDERS: Mapping[str, Callable[[str], bool]] = {
    "email": _has_email,
    "phone": _has_phone,
    "key": _has_key,
    "card": _has_card,
    "iban": _has_iban,
}
