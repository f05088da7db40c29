"""Longest prompt of a data set in tokens, from a sample and from every row that may be longer, not from characters."""

import json
import string
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from covey.data.checks import row_at, row_of
from covey.data.media import has_media
from covey.data.prompts import to_prompt
from covey.data.rendering import prompt_text

SAMPLE = 500
"""Rows of the even sample, of those with most bytes, and of those with most bytes that are no letters."""
_MOST = 10_000
"""Rows that are tokenized at most."""
_LETTERS = string.ascii_letters.encode()


def longest_prompt(dataset: Any, tokenizer: Any, template: Mapping[str, Any], name: str = "the data set") -> int:
    """Tokens of the longest prompt. Of a stream: of its first rows.

    Tokenized are an even sample, the rows of most bytes, those of most digits, signs and other scripts, and then, most bytes first, every
    row that would be the longest with as many tokens a byte as any row had; 10,000 in all. Raises DataError for a row that cannot be encoded.
    """

    def count(row: Mapping[str, Any], index: int) -> int:
        if has_media(row):  # their tokens are known to the processor alone
            return len(tokenizer(text=prompt_text(row["prompt"]))["input_ids"])
        features = getattr(dataset, "features", None)
        return len(to_prompt(row, str(index), row_of(index, name), tokenizer, template, features=features).token_ids)

    if not hasattr(dataset, "__len__"):
        return max((count(row, index) for index, row in enumerate(islice(dataset, 2 * SAMPLE))), default=0)
    sizes = [_sizes(prompt) for prompt in dataset["prompt"][:]]
    by_bytes = sorted(range(len(sizes)), key=lambda index: -sizes[index][0])
    by_signs = sorted(range(len(sizes)), key=lambda index: -sizes[index][1])
    longest, rate, done = 0, 0.0, set()

    def look(indices: Iterable[int]) -> None:
        nonlocal longest, rate
        for index in indices:
            if index not in done:
                tokens = count(row_at(dataset, index, name), index)
                longest, rate = max(longest, tokens), max(rate, tokens / max(1, sizes[index][0]))
                done.add(index)

    look([*by_bytes[:SAMPLE], *by_signs[:SAMPLE], *range(0, len(sizes), max(1, len(sizes) // SAMPLE))])
    for index in by_bytes:
        if sizes[index][0] * rate <= longest or len(done) >= _MOST:
            break
        look([index])
    return longest


def _sizes(prompt: Any) -> tuple[int, int]:
    """Bytes of a prompt in UTF-8, and how many of them are not ASCII letters: those take the most tokens."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str, ensure_ascii=False)
    encoded = text.encode(errors="replace")
    return len(encoded), len(encoded.translate(None, _LETTERS))
