"""sacrebleu's sentence BLEU: against a reference as the reward `bleu`, against a prompt's other completions as `self_bleu`."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from covey.data.features.language import language
from covey.declared import Range, checked_dataclass
from covey.errors import ConfigError, did_you_mean, needed
from covey.rewards.builtin.choice import gold_column
from covey.rewards.builtin.overlap import LengthRatio, excess, several
from covey.rewards.builtin.text import text_of
from covey.rewards.decorators import reward

_MECAB = {"ja": "ja-mecab", "ko": "ko-mecab"}
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_SMOOTHING = ("exp", "add-k", "floor", "none")
_LONGEST = 5000


@checked_dataclass(frozen=True)
class Bleu:
    """Sentence BLEU over 100 against the column `reference` (or else `summary`, `solution`, `answer`).

    Equal to `BLEU(effective_order=True).sentence_score` of sacrebleu (Post 2018) with all references of a row at once. `tokenize`
    is one of sacrebleu's tokenizers; without it, the one that sacrebleu recommends for the reference: `ja-mecab`, `ko-mecab`, `zh`
    with a Chinese character, else `13a`. With `max_ratio`, a text of more than that many times the reference's tokens has its score
    divided by the excess. `None` without a reference. Needs sacrebleu (`pip install 'covey[rewards]'`).
    """

    max_n: Annotated[int, Range(at_least=1, at_most=8)] = 4
    max_ratio: LengthRatio | None = None
    tokenize: str | None = None
    lowercase: bool = False
    smooth_method: Literal["exp", "add-k", "floor", "none"] = "exp"
    needs_one_of = ("reference", "summary", "solution", "answer")
    __name__ = "bleu"

    def __post_init__(self) -> None:
        if self.smooth_method not in _SMOOTHING:
            raise ConfigError(f"bleu(smooth_method={self.smooth_method!r}): use one of {', '.join(_SMOOTHING)}.")
        self._measure_for("")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rows = [several(reference) for reference in gold_column(self, columns)]
        measures = [self._measure_for(references[0] if references else "") for references in rows]
        texts = map(text_of, completions)
        scores = [self._score(*each) if each[2] else None for each in zip(measures, texts, rows, strict=True)]
        forget_texts(measures)
        return scores

    def _measure_for(self, reference: str) -> Any:
        tokenize = self.tokenize or tokenizer_for(reference)
        return measure_of(tokenize, self.max_n, self.smooth_method, self.lowercase)

    def _score(self, measure: Any, text: str, references: list[str]) -> float:
        bleu = measure.sentence_score(text, references)
        return as_share(bleu) / excess(bleu.sys_len, bleu.ref_len, self.max_ratio)


@reward(streams=True)
@checked_dataclass(frozen=True)
class SelfBleu:
    """Minus the BLEU of a text against the other completions of its prompt: 0 is unlike all of them, -1 a copy of one.

    Zhu et al. 2018 ("Texygen"), with sacrebleu's sentence BLEU and the tokenizer of the text's language. A text without a word
    scores -1, for it is alike any other empty one; a prompt's only completion scores 0. The first 5,000 characters of each
    text are compared, with at most 64 others. Needs sacrebleu (`pip install 'covey[rewards]'`).
    """

    max_n: Annotated[int, Range(at_least=1, at_most=8)] = 4
    __name__ = "self_bleu"

    def __post_init__(self) -> None:
        measure_of("13a", self.max_n)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = [text_of(completion)[:_LONGEST] for completion in completions]
        measures = [measure_of(tokenizer_for(text), self.max_n) for text in texts]
        scores = [_likeness(measure, texts, index) for index, measure in enumerate(measures)]
        forget_texts(measures)
        return [-score for score in scores]


def _likeness(measure: Any, texts: list[str], index: int) -> float:
    others = (texts[:index] + texts[index + 1 :])[:64]
    if not texts[index].strip():
        return 1.0
    return as_share(measure.sentence_score(texts[index], others)) if others else 0.0


def as_share(score: Any) -> float:
    """A score of sacrebleu, at most 100 and a rounding error, from 0 to 1."""
    return float(min(1.0, score.score / 100))


def tokenizer_for(text: str) -> str:
    """sacrebleu's tokenizer for the language of a text.

    >>> tokenizer_for("How many are there?"), tokenizer_for("\u4eca\u5929\u5929\u6c14\u5f88\u597d")
    ('13a', 'zh')
    """
    tokenizer = _MECAB.get(language(text) or "")
    return tokenizer or ("zh" if _HAN.search(text) else "13a")  # zh is 13a with every Chinese character a word


@lru_cache(maxsize=64)
def measure_of(tokenize: str, max_n: int, smooth_method: str = "exp", lowercase: bool = False) -> Any:
    """sacrebleu's `BLEU` for single sentences. Raises ConfigError where it, or the tokenizer's own package, is not installed."""
    with needed("the rewards bleu and self_bleu need sacrebleu", "rewards"):
        from sacrebleu.metrics.bleu import BLEU
    if tokenize not in BLEU.TOKENIZERS:
        tokenizers = sorted(BLEU.TOKENIZERS)
        near = did_you_mean(tokenize, tokenizers)
        raise ConfigError(f"bleu(tokenize={tokenize!r}) is not known.{near} sacrebleu has {', '.join(tokenizers)}.")
    options: dict[str, Any] = {"smooth_method": smooth_method, "lowercase": lowercase, "effective_order": True}
    try:
        return BLEU(tokenize=tokenize, max_ngram_order=max_n, **options)
    except RuntimeError as error:  # the one that sacrebleu raises where MeCab is not installed
        if tokenize not in _MECAB.values():
            raise
        install = f"pip install 'sacrebleu[{tokenize[:2]}]'"
        raise ConfigError(f"BLEU by the tokenizer {tokenize} needs MeCab: {install}, or tokenize='char'.") from error


def forget_texts(measures: Sequence[Any]) -> None:
    """Empty the caches of sacrebleu's tokenizers, which keep the last 65,536 texts: gigabytes in a long run."""
    for tokenizer in {measure.tokenizer for measure in measures}:
        for part in (tokenizer, getattr(tokenizer, "_post_tokenizer", tokenizer)):
            clear = getattr(type(part).__call__, "cache_clear", None)
            if clear is not None:
                clear()
