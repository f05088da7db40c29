"""Language identification of prompts: by script and stop words, else by py3langid's character statistics."""

import importlib.util
import re
from functools import lru_cache
from typing import Any

from covey.data.features.language import language

_SHARED = frozenset(("ru", "ar", "hi"))
"""Codes that name only the script of a text, shared with other languages."""
_NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\w+|https?://\S+|<[/\w]+>", re.DOTALL)
_ENOUGH_LETTERS = 20
_MOST = 1000
"""Characters that are read."""
_SURE = 0.8
"""Probability from which a code is believed. Texts of formulas stay below 0.3."""


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language; None where it is unclear. Without py3langid, sixteen languages are known.

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
    """True if py3langid is installed, which knows 97 languages."""
    return importlib.util.find_spec("py3langid") is not None


@lru_cache
def _identifier() -> Any:
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
