"""Environments: when a completion ends by itself, an environment may reply, and generation continues after the reply.

The reply's tokens enter the context of that completion only; the cache stays, and other completions decode on in the same
batch. The model did not write them, so their `mask` is False and their log-probability 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from covey.errors import DataError
from covey.types import Media, Prompt


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A completion that has just ended by itself, as the environment sees it."""

    prompt: Prompt
    sample: int
    """Index of the completion in its group."""
    token_ids: tuple[int, ...]
    """Token ids after the prompt, earlier replies included."""
    text: str
    """Text that the model wrote since the last reply, without special tokens."""

    @staticmethod
    def of(prompt: Prompt, sample: int, token_ids: Sequence[int], is_written: Sequence[bool], tokenizer: Any) -> Turn:
        """The turn that ends with `token_ids` [T], which the model wrote where `is_written` [T]."""
        since = max((t + 1 for t, is_sampled in enumerate(is_written) if not is_sampled), default=0)
        text = tokenizer.decode(token_ids[since:], skip_special_tokens=True)
        return Turn(prompt=prompt, sample=sample, token_ids=tuple(token_ids), text=text)


@dataclass(frozen=True, eq=False)
class Answer:
    """Token ids of a reply, and the images, sounds and videos that placeholders among them stand for."""

    token_ids: Sequence[int]
    media: Media | None = None

    def cut(self, room: int, banned: Collection[int]) -> Answer:
        """As much as fits into `room` tokens: without its media where not all of it does, up to the first of their placeholders."""
        ids = self.token_ids
        if len(ids) <= room:
            return self
        end = next((i for i, token in enumerate(ids) if token in banned), room) if self.media is not None else room
        return Answer(ids[: min(end, room)])


Reply: TypeAlias = "str | Sequence[int] | Answer | None"
"""Text (encoded without adding special tokens), token ids or an `Answer` to append to the completion; None ends it."""

Environment: TypeAlias = "Callable[[Sequence[Turn]], Sequence[Reply]]"
"""One reply for each turn. All completions that end in one decode step come in one call, so that tools can run concurrently.

Example, with ChatML: `lambda turns: [f"\\n<|im_start|>tool\\n{run(t.text)}<|im_end|>\\n<|im_start|>assistant\\n" if calls(t.text) else None for t in turns]`.
"""


def replies(
    environment: Environment, turns: Sequence[Turn], tokenizer: Any, banned: Collection[int] = ()
) -> list[Answer | None]:
    """The environment's replies as token ids. `banned`: those that stand for images or sounds, which no reply without these holds.

    Raises DataError unless there is one for each turn, and for one that holds a banned id.
    """
    outputs = list(environment(turns))
    if len(outputs) != len(turns):
        raise DataError(
            f"the environment gave {len(outputs)} replies to {len(turns)} turns; return one for each, None to end it."
        )
    encoded = [_encoded(reply, tokenizer) for reply in outputs]
    for turn, reply in zip(turns, encoded, strict=True):
        if banned and reply and reply.media is None and not set(banned).isdisjoint(reply.token_ids):
            raise DataError(
                f"a reply to a completion of prompt {turn.prompt.uid} holds a token that stands for an image or a sound, and no image or "
                "sound with it; leave it out of the reply."
            )
    return encoded


def _encoded(reply: Reply, tokenizer: Any) -> Answer | None:
    if reply is None or isinstance(reply, Answer):
        return reply
    return Answer(tokenizer(reply, add_special_tokens=False)["input_ids"] if isinstance(reply, str) else reply)
