"""Rewards a text for being in the wanted language: by its script, and where languages share one, by statistics of letters."""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from covey.declared import Count, checked_dataclass
from covey.errors import ConfigError, RewardError, needed
from covey.rewards.builtin.text import text_of

_CYRILLIC = frozenset({"CYRILLIC"})
_ARABIC = frozenset({"ARABIC"})
_DEVANAGARI = frozenset({"DEVANAGARI"})
_KANA = frozenset({"HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"})
_SCRIPTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(["am", "ti"], frozenset({"ETHIOPIC"})),
    **dict.fromkeys(["ar", "fa", "ur", "ps", "ug", "sd"], _ARABIC),
    **dict.fromkeys(["be", "bg", "kk", "ky", "mk", "mn", "ru", "tg", "uk"], _CYRILLIC),
    **dict.fromkeys(["hi", "mr", "ne"], _DEVANAGARI),
    "sr": _CYRILLIC | {"LATIN"},
    "bn": frozenset({"BENGALI"}),
    "el": frozenset({"GREEK"}),
    "gu": frozenset({"GUJARATI"}),
    "he": frozenset({"HEBREW"}),
    "hy": frozenset({"ARMENIAN"}),
    "ja": _KANA | {"CJK"},
    "ka": frozenset({"GEORGIAN"}),
    "km": frozenset({"KHMER"}),
    "ko": frozenset({"HANGUL", "CJK"}),
    "ta": frozenset({"TAMIL"}),
    "te": frozenset({"TELUGU"}),
    "th": frozenset({"THAI"}),
    "zh": frozenset({"CJK", "BOPOMOFO"}),
}
"""The scripts of languages that are not written in Latin letters."""
_BY_SCRIPT = frozenset(["bn", "el", "gu", "he", "hy", "ja", "ka", "km", "ko", "ta", "te", "th", "zh"])
"""Languages that their script gives away."""
_NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|https?://\S+|<[/\w]+>", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.!?;:。！？…])\s*|\n+")  # noqa: RUF001 - the full-width marks end sentences too
_LONGEST = 20_000
_CHUNK_LETTERS = 60


@checked_dataclass(frozen=True)
class Language:
    """Share of a text's letters that are in the wanted language, from 0 to 1.

    Pieces of some sentences (60 letters and more) are judged one by one, so a text that changes its language half way gets
    half; a letter of another script never counts. Code, formulas, tags and addresses are left out. `language` is an ISO 639-1
    code such as `de`; without it, the column `language` holds each prompt's own. Below `min_letters` letters it cannot be
    told: `None`, and 0.0 for a text without any sign. The first 20,000 characters are read. Needs py3langid
    (`pip install 'covey[rewards]'`); short pieces of near languages (Danish and Norwegian, say) are often confused.
    """

    language: str | None = None
    min_letters: Count = 20
    __name__ = "language"

    def __post_init__(self) -> None:
        if self.language is not None:
            _check(self.language)

    @property
    def needs_one_of(self) -> tuple[str, ...]:
        return ("language",) if self.language is None else ()

    def __call__(
        self, completions: Sequence[Any], language: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        codes = [self.language] * len(completions) if self.language is not None else language
        if codes is None:
            raise RewardError("language needs a code: language(language='de'), or a column 'language'.")
        return [self._share(text_of(c), code) for c, code in zip(completions, codes, strict=True)]

    def _share(self, text: str, target: Any) -> float | None:
        if target is None:
            return None
        if not text.strip():
            return 0.0
        code = str(target)
        _check(code)
        prose = _NOT_PROSE.sub(" ", text[:_LONGEST])
        total = sum(map(str.isalpha, prose))
        if total < self.min_letters:
            return None
        matching = sum(_letters_of(chunk, code) for chunk in _chunks(prose) if _is_in(chunk, code))
        return matching / total


def _chunks(text: str) -> list[str]:
    """Sentences, short ones joined with their successors until a chunk has 60 letters; the rest joins the last chunk."""
    chunks, current, letters = [], "", 0
    for sentence in _SENTENCE.split(text):
        current, letters = f"{current} {sentence}", letters + sum(map(str.isalpha, sentence))
        if letters >= _CHUNK_LETTERS:
            chunks.append(current)
            current, letters = "", 0
    if chunks and letters < _CHUNK_LETTERS // 2:
        chunks[-1] += current
    elif current:
        chunks.append(current)
    return chunks


def _is_in(chunk: str, code: str) -> bool:
    if code not in _BY_SCRIPT:
        return detected(chunk) == code
    if code == "zh":  # kana are never Chinese
        return not any(_script(c) in _KANA for c in chunk)
    return True


def _letters_of(chunk: str, code: str) -> int:
    scripts = _SCRIPTS.get(code, frozenset({"LATIN"}))
    return sum(c.isalpha() and _script(c) in scripts for c in chunk)


@lru_cache(maxsize=20_000)
def _script(character: str) -> str:
    """First word of the character's name in Unicode: LATIN, CJK, HANGUL ..."""
    return unicodedata.name(character, "").partition(" ")[0]


def detected(text: str) -> str:
    """The most probable language of a text, as an ISO 639-1 code."""
    return str(_identifier().classify(text)[0])


def _check(code: str) -> None:
    codes = _BY_SCRIPT if code in _BY_SCRIPT else _identifier().labels
    if code not in codes:
        labels = ", ".join(sorted(_identifier().labels))
        raise ConfigError(f"language {code!r} is not known; use an ISO 639-1 code such as en, de, zh: {labels}.")


@lru_cache
def _identifier() -> Any:
    with needed("the reward language needs py3langid", "rewards"):
        from py3langid import langid
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)
