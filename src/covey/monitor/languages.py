"""Language consistency: answers in the language of their prompt, identified from the text, and counted by language."""

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


def is_same(text: str, code: str) -> bool | None:
    """True if a text is in the language of this code; None where that is unclear (too short, numbers only)."""
    identified = language(text)
    return None if identified is None else identified == code


def language_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """`languages/<code>/same`, the share of answers in the prompt's language, and `/count`, the answers whose language was identified.

    Of prompts whose column `language` is known; nothing without it.
    """
    metrics: dict[str, Metric] = {}
    for group in groups:
        code = code_of(group.prompt.columns.get(LANGUAGE))
        if code is None:
            continue
        identified = [same for completion in group.completions if (same := is_same(completion.text, code)) is not None]
        if not identified:
            continue
        mean, count = Mean(float(sum(identified)), float(len(identified))), Sum(float(len(identified)))
        before, counted = metrics.get(f"languages/{code}/same"), metrics.get(f"languages/{code}/count")
        metrics[f"languages/{code}/same"] = before + mean if isinstance(before, Mean) else mean
        metrics[f"languages/{code}/count"] = counted + count if isinstance(counted, Sum) else count
    return metrics
