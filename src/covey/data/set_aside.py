"""Prompts of a stream without those that were set aside after bad numbers."""

from collections.abc import Sequence

from covey.data.stream import PromptStream
from covey.errors import DataError
from covey.types import Prompt

_DRAWS_WITHOUT_A_PROMPT = 100_000


def take(prompts: PromptStream, n: int, set_aside: Sequence[str]) -> list[Prompt]:
    """The next `n` prompts that are not set aside (excluded after bad numbers). Raises DataError when none is left."""
    if not set_aside:
        return prompts.take(n)
    refused, taken = frozenset(set_aside), list[Prompt]()
    misses = 0
    while len(taken) < n:
        prompt = prompts.take(1)[0]
        misses = misses + 1 if row_of(prompt) in refused else 0
        if not misses:
            taken.append(prompt)
        elif misses >= (prompts.num_rows or _DRAWS_WITHOUT_A_PROMPT):
            raise DataError("Every prompt of the data set has led to bad numbers and is set aside; look at bad_steps/.")
    return taken


def row_of(prompt: Prompt) -> str:
    """Key of a prompt's row in the data set, independent of the epoch."""
    return prompt.uid.partition(":")[2] or prompt.uid
