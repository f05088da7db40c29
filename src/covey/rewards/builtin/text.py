"""Rewards for form: format, length, repetition. Each is a function, or a frozen dataclass where it has parameters."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import numpy as np

from covey.data.rendering import content_text
from covey.declared import Count, CountOrZero, Range, checked_dataclass
from covey.errors import ConfigError, RewardError

_GSM8K_END = re.compile(r"####[ \t]*[-+]?\$?(\d[\d,]*(\.\d+)?|\.\d+)\s*$")

_UNSPACED = (
    "\u3040-\u309f\u30a0-\u30ff\u31f0-\u31ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
    "\u0e00-\u0e7f\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
)
_MARKS = "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u17b4-\u17d3"
"""Vowels and tones that belong to the letter before them."""
_WORD = re.compile(f"[{_UNSPACED}][{_MARKS}]*|[^\\W{_UNSPACED}]+")


def words_in(text: str) -> list[str]:
    """The words of a text: runs of letters and digits; where a script has no spaces between words, each of its characters.

    Characters are what BLEU counts for Chinese too (Post 2018, <https://arxiv.org/abs/1804.08771>).

    >>> words_in("It's 3.5"), words_in("\u6211\u67093\u4e2a apples")
    (['It', 's', '3', '5'], ['\u6211', '\u6709', '3', '\u4e2a', 'apples'])
    """
    return [word for word in _WORD.findall(text) if word[0].isalnum() or len(word) > 1 or word == "_"]


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of the assistant's messages, a blank line between them."""
    return "\n\n".join(turns_of(completion))


def turns_of(completion: Any) -> list[str]:
    """The texts of the assistant's messages that are not empty; a completion of text is one turn."""
    if isinstance(completion, str):
        return [completion]
    turns = (content_text(m.get("content")) for m in completion if m.get("role", "assistant") == "assistant")
    return list(filter(None, turns))


def values_in(cell: Any) -> list[Any]:
    """The values of a cell that may hold several, without missing ones (None, NaN); of arrays and tensors as Python's.

    Whole numbers that pandas stores as floats, because others in their column are missing, are whole again. Raises RewardError
    for a mapping.

    >>> values_in("a"), values_in(["a", None, "b"]), values_in(float("nan")), values_in(2.0)
    (['a'], ['a', 'b'], [], [2])
    """
    if str(getattr(cell, "dtype", "")).removeprefix("torch.") in ("float16", "float32"):
        cell = np.asarray(cell).astype(str).astype(float)  # 0.1 stays 0.1, not what its bits are in float64
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    if isinstance(cell, Mapping):
        raise RewardError(
            f"a row has an answer with the fields {', '.join(map(str, cell))} where a text, a number or a list of them belongs; "
            "make a column of the field that counts."
        )
    if isinstance(cell, list | tuple):
        return [value for item in cell for value in values_in(item)]
    if isinstance(cell, float) and cell.is_integer():
        return [int(cell)]
    with suppress(TypeError):  # of pandas' NA, which is neither equal to itself nor not
        return [] if cell is None or cell != cell else [cell]
    return []


def last_tagged(text: str, name: str) -> str | None:
    """Inside of the last `<name>...</name>`, `None` without one; read from the end, in time that is linear in the text.

    >>> last_tagged("<a>1</a> <a>2</a> <a>", "a"), last_tagged("<a>1", "a")
    ('2', None)
    """
    opening, closing = f"<{name}>", f"</{name}>"
    end = text.rfind(closing)
    while end >= 0:
        before = text.rfind(closing, 0, end)
        start = text.find(opening, before + len(closing) if before >= 0 else 0, end)
        if start >= 0:
            return text[start + len(opening) : end]
        end = before
    return None


def format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 where the text ends with a line such as `#### 42`, as GSM8K's answers do; 0.0 elsewhere."""
    return [float(_GSM8K_END.search(text_of(completion)) is not None) for completion in completions]


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """TRL's reward of this name: 1.0 where the text begins with the only `<think>` and closes it; 0.0 elsewhere."""
    return [float(_is_thought(text_of(completion))) for completion in completions]


def _is_thought(text: str) -> bool:
    opened, _, rest = text.partition("<think>")
    return not opened and text.startswith("<think>") and "<think>" not in rest and "</think>" in rest


@checked_dataclass(frozen=True)
class Length:
    """Minus the distance of the length from `target`: the reward of TRL's first example. 0 is best."""

    target: int = 20
    unit: Literal["characters", "words", "tokens"] = "characters"
    """Words as `words_in` counts them: of scripts without spaces each character is one."""

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        if self.unit == "tokens":
            lengths = [len(ids) for ids in completion_ids]
        else:
            measure = words_in if self.unit == "words" else str
            lengths = [len(measure(text_of(c))) for c in completions]
        return [-float(abs(self.target - length)) for length in lengths]


@checked_dataclass(frozen=True)
class SoftOverlong:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then falling in a line to -1 at the end and beyond.

    `-(length - (L_max - L_cache)) / L_cache` in between. DAPO (Yu et al. 2025), eq. 13; parameters named as in TRL.
    """

    max_completion_len: CountOrZero
    soft_punish_cache: CountOrZero
    __name__ = "soft_overlong_punishment_reward"  # TRL's name in the metrics

    def __post_init__(self) -> None:
        if self.soft_punish_cache > self.max_completion_len:
            raise ConfigError(
                f"soft_overlong: soft_punish_cache={self.soft_punish_cache} must lie between 0 and "
                f"max_completion_len={self.max_completion_len}."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return -1.0 if length > self.max_completion_len else (free - length) / self.soft_punish_cache


@checked_dataclass(frozen=True)
class Repetition:
    """`max_penalty` times the share of n-grams of tokens that repeat earlier ones; 0 for texts shorter than one.

    `(1 - unique / all) * max_penalty`. Yeo et al. 2025 ("Demystifying Long Chain-of-Thought Reasoning"), appendix C.2.
    """

    ngram_size: Count = 3
    max_penalty: Annotated[float, Range(at_most=0)] = -1.0
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [self._penalty(tuple(ids)) for ids in completion_ids]

    def _penalty(self, ids: tuple[int, ...]) -> float:
        grams = [ids[start : start + self.ngram_size] for start in range(len(ids) - self.ngram_size + 1)]
        if len(set(grams)) == len(grams):
            return 0.0
        return (1 - len(set(grams)) / len(grams)) * self.max_penalty


get_soft_overlong_punishment = SoftOverlong
"""TRL's name for `SoftOverlong`."""
get_repetition_penalty_reward = Repetition
"""TRL's name for `Repetition`."""


def clean(text: str) -> str:
    """The text with half characters, which tokenizers and JSON parsers refuse, as question marks."""
    return text.encode(errors="replace").decode()
