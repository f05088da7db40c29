"""Masking of secrets in the records of a run: the value is replaced, the name stays."""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# `token` alone is a word of the field (pad_token, num_tokens), so only compounds that mean a password count.
_NAME = r"(?:api|access|private|secret)[_-]?key|secret|passw(?:or)?d|(?:hub|hf|auth|access|bearer|api)[_-]?token|credentials?|webhook"
_SECRET_NAME = re.compile(rf"(?:^|[_.\-])(?:{_NAME})(?:$|[_.\-])|^authorization$", re.IGNORECASE)
_ASSIGNED = re.compile(rf"((?:{_NAME})[\"']?\s*[:=]\s*[\"']?)([^\s\"',;}}]{{4,}})", re.IGNORECASE)
_OPTION = re.compile(rf"^--?(?:[\w\-]*[_\-])?(?:{_NAME})$", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9\-]{10,}|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]+|AIza[\w\-]{30,})"
)
_BEARER = re.compile(r"(Bearer\s+)[\w.\-+/=]{8,}", re.IGNORECASE)
_IN_URL = re.compile(r"(\w+://[^\s:/@]*:)[^\s@/]+(@)")


def mask_text(text: str) -> str:
    """Text with passwords, API keys and the user part of URLs replaced by `***`.

    >>> mask_text("https://me:hunter2@host/x?api_key=abcdef")
    'https://me:***@host/x?api_key=***'
    """
    text = _IN_URL.sub(rf"\1{MASK}\2", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    text = _SHAPES.sub(MASK, text)
    return _ASSIGNED.sub(rf"\1{MASK}", text)


def mask(value: Any, name: str = "") -> Any:
    """A JSON value with every secret in it masked, by the name it stands under or by its shape."""
    if isinstance(value, str):
        return MASK if value and _SECRET_NAME.search(name) else mask_text(value)
    if isinstance(value, Mapping):
        return {key: mask(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask(item, name) for item in value]
    return value


def mask_command(words: list[str]) -> list[str]:
    """A command line with the values of secret options masked, `--hub-token x` as well as `--hub-token=x`."""
    previous = ["", *words[:-1]]
    return [MASK if _OPTION.match(before) else mask_text(word) for before, word in zip(previous, words, strict=True)]
