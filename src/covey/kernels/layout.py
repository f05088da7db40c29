"""Where prompts and completions stand in a packed row `[prompt | c1 | ... | cG]`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Where a prompt and its completions stand in the packed row."""

    start: int
    length: int
    """Tokens of the prompt."""
    counts: tuple[int, ...]
    """Tokens of each completion; they follow the prompt without a gap."""

    @property
    def prompt(self) -> slice:
        return slice(self.start, self.start + self.length)

    @property
    def answers(self) -> slice:
        return slice(self.start + self.length, self.start + self.length + sum(self.counts))

    def each_answer(self) -> list[slice]:
        """The place of every completion that is not empty."""
        places, first = [], self.start + self.length
        for count in self.counts:
            if count:
                places.append(slice(first, first + count))
            first += count
        return places
