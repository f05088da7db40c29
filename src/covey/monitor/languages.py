"""Language consistency: answers in the language of their prompt, identified from the text, and counted by language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.data.features.language import LANGUAGES, language
from covey.types import Group, Mean, Metric, Sum

LANGUAGE = "language"
"""The column that names each prompt's language."""
_NAMES = {
    **{"english": "en", "german": "de", "french": "fr", "spanish": "es", "italian": "it", "portuguese": "pt"},
    **{"dutch": "nl", "chinese": "zh", "japanese": "ja", "korean": "ko", "russian": "ru", "greek": "el"},
    **{"arabic": "ar", "hebrew": "he", "hindi": "hi", "thai": "th"},
}


def code_of(value: Any) -> str | None:
    """The ISO 639-1 code of a language that can be identified from text, None for another or none.

    >>> code_of("German"), code_of("zh-CN"), code_of("Klingon")
    ('de', 'zh', None)
    """
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    code = _NAMES.get(text) or text.replace("_", "-").partition("-")[0]
    return code if code in LANGUAGES else None


def is_same(text: str, wanted: str) -> bool | None:
    """True if a text is in the language of this code; None where that is unclear (too short, numbers only)."""
    found = language(text)
    return None if found is None else found == wanted


def language_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """`languages/<code>/same`, the share of answers in the prompt's language, and `/count`, the answers whose language was identified.

    Of prompts whose column `language` is known; nothing without it.
    """
    found: dict[str, Metric] = {}
    for group in groups:
        wanted = code_of(group.prompt.columns.get(LANGUAGE))
        if wanted is None:
            continue
        told = [same for one in group.completions if (same := is_same(one.text, wanted)) is not None]
        if not told:
            continue
        mean, count = Mean(float(sum(told)), float(len(told))), Sum(float(len(told)))
        before, counted = found.get(f"languages/{wanted}/same"), found.get(f"languages/{wanted}/count")
        found[f"languages/{wanted}/same"] = before + mean if isinstance(before, Mean) else mean
        found[f"languages/{wanted}/count"] = counted + count if isinstance(counted, Sum) else count
    return found
