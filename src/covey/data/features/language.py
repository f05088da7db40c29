"""Language identification: by script, and for Latin script by stop words. Cheap, and unsure of short texts."""

import re
from collections import Counter

_SCRIPTS = {
    "ja": "\u3040-\u30ff",
    "zh": "\u3400-\u4dbf\u4e00-\u9fff",
    "ko": "\uac00-\ud7af\u1100-\u11ff",
    "ru": "\u0400-\u04ff",
    "el": "\u0370-\u03ff",
    "ar": "\u0600-\u06ff",
    "he": "\u0590-\u05ff",
    "hi": "\u0900-\u097f",
    "th": "\u0e00-\u0e7f",
}
_OF_SCRIPT = {name: re.compile(f"[{signs}]") for name, signs in _SCRIPTS.items()}
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"[^\W\d_]+")
_SMALL_WORDS = {
    "en": "a or do the of and to in is that it for was with as on are he she they his her how many much what if each at by from this has have an be",
    "de": "der die das und ist nicht ein eine zu den mit von sich auf für dem des im wie viele wenn sie er es auch als an war wird hat",
    "fr": "le la les des et est une un du que dans qui pour sur pas au avec il elle combien si ce son sa ses par plus ont être aux",
    "es": "el la los las de y que en un una es por con para su se cuántos cuántas si más como al lo del ella cada tiene cuál son",
    "it": "il lo la gli le di che e è un una per con del della in non si sono quanti quante se più come ha dei nel ogni suo alla",
    "pt": "o a os as de e que em um uma é por com para seu sua se quantos quantas mais como ao do da no na cada tem são não",
    "nl": "de het een en van is dat in te op met voor niet zijn aan hoeveel als er bij hij zij ook door naar heeft elke wordt",
}
_SMALL_AND_ENGLISH = "a i in is as do no on an die war hat met van son me or"
_ALSO_ENGLISH = frozenset(_SMALL_AND_ENGLISH.split())
_LANGUAGES = {
    name: frozenset(words.split()) - (_ALSO_ENGLISH if name != "en" else frozenset())
    for name, words in _SMALL_WORDS.items()
}
_OF_WORD = {
    word: tuple(name for name, words in _LANGUAGES.items() if word in words)
    for word in frozenset[str]().union(*_LANGUAGES.values())
}
LANGUAGES = frozenset(_SCRIPTS) | frozenset(_SMALL_WORDS)
"""Codes that `language` can return."""
_FEWEST_SMALL_WORDS = 3
_ENOUGH = 1000
"""Characters that are read."""


def language(text: str) -> str | None:
    """The code of the language, or None for too little text, none of the known ones, or a tie.

    >>> language("How many apples does she have if each of the boys takes two?"), language("Wie viele sind es, und wo ist der Rest?")
    ('en', 'de')
    >>> language("x = 3"), language("彼女はりんごをいくつ持っていますか")
    (None, 'ja')
    """
    text = text[:_ENOUGH]
    if not text.isascii():
        letters = max(len(_LETTER.findall(text)), 1)
        for name, signs in _OF_SCRIPT.items():  # Japanese first: it has Chinese characters too
            if len(signs.findall(text)) > letters * (0.1 if name == "ja" else 0.5):
                return name
    scores = Counter(name for word in _WORD.findall(text.casefold()) for name in _OF_WORD.get(word, ()))
    ranked = [*scores.most_common(2), ("", 0), ("", 0)]
    (name, best), (_, second) = ranked[:2]
    return name if best >= _FEWEST_SMALL_WORDS and best > second else None
