"""Positions of prompts and completions in a packed row `[prompt | c1 | ... | cG]`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Positions of one prompt and its completions in a packed row."""

    start: int
    length: int
    """Tokens of the prompt."""
    counts: tuple[int, ...]
    """Tokens of each completion; completions follow the prompt without gaps."""

    @property
    def prompt(self) -> slice:
        return slice(self.start, self.start + self.length)

    @property
    def answers(self) -> slice:
        return slice(self.start + self.length, self.start + self.length + sum(self.counts))

    def each_answer(self) -> list[slice]:
        """Slices of all non-empty completions."""
        places, first = [], self.start + self.length
        for count in self.counts:
            if count:
                places.append(slice(first, first + count))
            first += count
        return places
