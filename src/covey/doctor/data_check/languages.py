"""The language of a prompt: by script and small words, and where these do not tell, by py3langid's statistics of letters."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from typing import Any

from covey.data.features.language import language

_SHARED = frozenset(("ru", "ar", "hi"))
"""Codes that only say of which script a text is, which other languages are written in too."""
_NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\w+|https?://\S+|<[/\w]+>", re.DOTALL)
_ENOUGH_LETTERS = 20
_MOST = 1000
"""Characters that are looked at."""
_SURE = 0.8
"""Probability from which a code is believed. Texts of formulas stay below 0.3."""


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language; None where it cannot be told. Without py3langid, sixteen languages are known.

    >>> language_of("How many apples does she have if each of the boys takes two?"), language_of("x = 3")
    ('en', None)
    """
    quick = language(text)
    if (quick is not None and quick not in _SHARED) or not knows_many():
        return quick
    prose = _NOT_PROSE.sub(" ", text[:_MOST])
    if sum(map(str.isalpha, prose)) < _ENOUGH_LETTERS:
        return quick
    code, probability = _identifier().classify(prose)
    return str(code) if probability >= _SURE else quick


@lru_cache
def knows_many() -> bool:
    """Whether py3langid is installed, which knows 97 languages."""
    return importlib.util.find_spec("py3langid") is not None


@lru_cache
def _identifier() -> Any:
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
