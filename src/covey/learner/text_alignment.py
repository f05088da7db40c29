"""Alignment of two tokenizers on the same text, for a teacher that reads other tokens than the policy writes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from covey.data.rendering import control_texts, plain_ids
from covey.learner.packing import Row, filler
from covey.types import Prompt

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that is a part of a character."""
MOST_PARTS = 8
"""Tokens in a row that may end within a character; a longer run is no text."""
CONTEXT = 4
"""Last tokens of a prompt with which a completion is decoded: some tokenizers drop a space at the beginning of a text."""
Span = tuple[int, int, int, int]
"""Begin and end of a piece of text in the policy's tokens, and in the teacher's."""


@dataclass(frozen=True)
class Aligned:
    """A completion in the teacher's tokens, and the pieces of text at whose ends both tokenizers part."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    spans: tuple[Span, ...] = ()

    def row(self, row: Row) -> Row:
        """The row in the teacher's tokens; a filler where no span is aligned, so that every process makes the same passes."""
        if not self.spans:
            return filler()
        completion = replace(row.completion, token_ids=torch.tensor(self.completion))
        return replace(row, prompt=replace(row.prompt, token_ids=self.prompt), completion=completion)


def read_ends(tokenizer: Any, before: Sequence[int], ids: Sequence[int], text: str) -> dict[int, int]:
    """Number of tokens by how many characters of `text` they spell, for every token that ends between two characters.

    It stops where the tokens spell another text. `before`: tokens in front of them, as context for the decoder.
    """
    decode = partial(_decoded, tokenizer)
    tokens = [*before, *ids]
    start, shown, place = 0, len(before), 0
    ends = {0: 0}
    for end in range(shown + 1, len(tokens) + 1):
        piece = decode(tokens[start:end])[len(decode(tokens[start:shown])) :]
        if text.startswith(piece, place):
            place += len(piece)
            ends.setdefault(place, end - len(before))
            start, shown = shown, end
        elif not piece.endswith(BROKEN) or end - shown >= MOST_PARTS:
            break
    return ends


@dataclass(frozen=True, eq=False)
class TextAlignment:
    """A teacher's tokenizer and the policy's. The teacher reads the text of a completion, encoded as it encodes text.

    Between two places where both tokenizers part, policy and teacher have written the same characters after the same text. By the
    chain rule the sum of log-probabilities of either's tokens there is that of the piece. Where no piece is shared, the teacher says
    nothing: behind a control token or a character that the text does not hold, and at the end of a completion that was cut, which the
    teacher might continue in the same token. X-Token, 2026, <https://arxiv.org/abs/2605.21699>, and TRL's GOLD align in this way.
    """

    policy: Any
    """Tokenizer of the policy."""
    teacher: Any
    """Tokenizer of the teacher."""
    prompt_ids: Callable[[Prompt, str | None], tuple[int, ...]]
    """Ids of a prompt, with feedback where there is some, in the teacher's tokens."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a completion of the policy."""
    controls: tuple[frozenset[int], frozenset[int]] = field(init=False)
    cached: Any = field(init=False)

    def __post_init__(self) -> None:
        controls = [_ids_of(tokenizer, control_texts(tokenizer)) for tokenizer in (self.policy, self.teacher)]
        object.__setattr__(self, "controls", (controls[0] | set(self.eos_ids), controls[1]))
        object.__setattr__(self, "cached", lru_cache(maxsize=4096)(self._aligned))
        object.__setattr__(self, "prompt_ids", lru_cache(maxsize=256)(self.prompt_ids))  # by prompt, not by its text

    def __call__(self, row: Row) -> Aligned:
        ids = tuple(row.completion.token_ids.tolist())
        ends = row.completion.finish == "stop"
        prompt = self.prompt_ids(row.prompt, row.hint)
        completion, spans = self.cached(row.prompt.token_ids[-CONTEXT:], prompt[-CONTEXT:], ids, ends)
        return Aligned(prompt, completion, spans)

    def _aligned(
        self, before: tuple[int, ...], theirs_before: tuple[int, ...], ids: tuple[int, ...], ends: bool
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """The teacher's tokens of a completion, and the spans."""
        last = next((place for place, token in enumerate(ids) if token in self.controls[0]), len(ids))
        text = _text_of(self.policy, before, ids[:last])
        theirs = tuple(plain_ids(self.teacher, text))
        mine_at = read_ends(self.policy, before, ids[:last], text)
        theirs_at = read_ends(self.teacher, theirs_before, theirs, text)
        is_cut = last == len(ids)  # its end may go on in the same token
        limit = text.find(BROKEN) if BROKEN in text else len(text) - is_cut
        places = sorted(place for place in mine_at.keys() & theirs_at.keys() if place <= limit)
        spans = [(mine_at[a], mine_at[b], theirs_at[a], theirs_at[b]) for a, b in itertools.pairwise(places)]
        end = getattr(self.teacher, "eos_token_id", None)
        is_end = ends and last == len(ids) - 1 and ids[last] in self.eos_ids
        if is_end and end is not None and bool(places) and places[-1] == len(text):
            spans.append((last, last + 1, len(theirs), len(theirs) + 1))
            theirs = (*theirs, int(end))
        return theirs, tuple(spans)


def _text_of(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    return _decoded(tokenizer, [*before, *ids])[len(_decoded(tokenizer, before)) :]


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _ids_of(tokenizer: Any, texts: Sequence[str]) -> frozenset[int]:
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = tokenizer.convert_tokens_to_ids(list(texts)) if texts else []
    return frozenset(token for token in ids if token is not None and token != unknown) | (
        frozenset() if unknown is None else frozenset({int(unknown)})
    )


def over_policy(aligned: Sequence[Aligned], logp: Sequence[Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The teacher's log-probabilities [m_i] of its tokens as those of the policy's spans.

    [N, T] each: the log-probability of a span at its first token, 0 elsewhere; and for every token of a span 1 + the place of its
    first token, 0 where none is aligned.
    """
    total, first = torch.zeros(shape, dtype=torch.float32), torch.zeros(shape, dtype=torch.long)
    for n, (row, values) in enumerate(zip(aligned, logp, strict=True)):
        if not row.spans:
            continue
        upto = torch.cat([values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)]).cpu()
        spans = torch.tensor(row.spans)
        total[n, spans[:, 0]] = (upto[spans[:, 3]] - upto[spans[:, 2]]).float()
        lengths = spans[:, 1] - spans[:, 0]
        begins = (spans[:, 0] + 1).repeat_interleave(lengths)
        first[n, spans[0, 0] : spans[-1, 1]] = begins  # spans stand one behind the other
    return total, first
