"""Garbled text (wrong encodings, control characters): repaired where possible, reported where characters are lost."""

import importlib.util
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from covey.files.bounded import whole_characters

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Colours and titles of a terminal."""
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u200b\u2060\u202d\u202e\ufeff\ufff9-\ufffb]")
"""Invisible characters: control characters but tab and line ends, zero-width spaces, bidirectional marks."""
_ASCII_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

FAULTS: Mapping[str, str] = {
    "mojibake": "text read in the wrong encoding",
    "controls": "control or invisible characters",
    "surrogates": "half of a character",
    "form": "characters in a Unicode form that is not NFC",
}


def repaired(text: str, mend: Collection[str] = FAULTS.keys()) -> tuple[str, tuple[str, ...]]:
    """(the text with the wanted faults repaired, the faults that it had). Idempotent.

    >>> repaired("caf\\u00c3\\u00a9 \\u200bnoir")
    ('café noir', ('mojibake', 'controls'))
    """
    if text.isascii() and not _ASCII_CONTROLS.search(text):
        return text, ()
    faults: dict[str, None] = {}
    before = None
    while before != text:  # one repair may expose another fault, such as an accent behind a control character
        before = text
        for fault, mender in _MENDERS.items():
            mended = mender(text) if fault in mend else text
            if mended != text:
                faults[fault] = None
            text = mended
    return text, tuple(faults)


def is_lossy(text: str) -> bool:
    """True where characters were replaced by U+FFFD, so that the originals are lost."""
    return "\ufffd" in text


def repaired_row(value: Any, mend: Collection[str] = FAULTS.keys()) -> tuple[Any, dict[str, None]]:
    """(the value with every text in it repaired, through lists and objects, the faults they had)."""
    if isinstance(value, str):
        text, faults = repaired(value, mend)
        return text, dict.fromkeys(faults)
    all_faults: dict[str, None] = {}
    if isinstance(value, Mapping):
        row = {}
        for name, item in value.items():
            row[name], its_faults = repaired_row(item, mend)
            all_faults |= its_faults
        return row, all_faults
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            mended, its_faults = repaired_row(item, mend)
            items.append(mended)
            all_faults |= its_faults
        return items, all_faults
    return value, all_faults


@lru_cache
def knows_mojibake() -> bool:
    """True if this machine can detect mojibake, which needs ftfy."""
    return importlib.util.find_spec("ftfy") is not None


def _without_mojibake(text: str) -> str:
    if text.isascii() or not knows_mojibake():
        return text
    import ftfy

    return ftfy.fix_encoding(text)


_MENDERS: Mapping[str, Callable[[str], str]] = {
    "surrogates": whole_characters,
    "mojibake": _without_mojibake,
    "controls": lambda text: _CONTROLS.sub("", _ESCAPES.sub("", text)),
    "form": lambda text: unicodedata.normalize("NFC", text),
}
