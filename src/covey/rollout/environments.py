"""Tools and turns: when a completion ends by itself, an environment may answer, and the model goes on from there.

The answer's tokens enter the context of that completion alone; what is cached stays, and other completions decode on
in the same batch. They are not the model's, so their `mask` is False and their log-probability 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from covey.errors import DataError
from covey.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A completion that has just ended by itself."""

    prompt: Prompt
    sample: int
    """Which of its group's completions."""
    token_ids: tuple[int, ...]
    """Everything after the prompt, earlier answers included."""
    text: str
    """What the model wrote since the last answer, without special tokens."""


Reply: TypeAlias = "str | Sequence[int] | None"
"""Text (encoded without special tokens of the tokenizer's own), or token ids, that the completion goes on from. None: it is over."""

Environment: TypeAlias = "Callable[[Sequence[Turn]], Sequence[Reply]]"
"""One reply for each turn. All completions that end in one step are asked together, so that tools can run side by side.

Example, with ChatML: `lambda turns: [f"\\n<|im_start|>tool\\n{run(t.text)}<|im_end|>\\n<|im_start|>assistant\\n" if calls(t.text) else None for t in turns]`.
"""


def replies(environment: Environment, turns: Sequence[Turn], tokenizer: Any) -> list[list[int] | None]:
    """What the environment answers, as token ids. Raises DataError when it does not answer every turn."""
    given = list(environment(turns))
    if len(given) != len(turns):
        raise DataError(
            f"the environment gave {len(given)} replies to {len(turns)} turns; return one for each, None to end it."
        )
    return [_encoded(reply, tokenizer) for reply in given]


def _encoded(reply: Reply, tokenizer: Any) -> list[int] | None:
    if reply is None:
        return None
    return list(tokenizer(reply, add_special_tokens=False)["input_ids"]) if isinstance(reply, str) else list(reply)
