"""Settings of an inspection: the checks and their thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from covey.doctor.data_check.encoding import FAULTS
from covey.doctor.data_check.findings import KINDS
from covey.errors import ConfigError, did_you_mean

Answers = Literal["auto", "number", "math", "text"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the check of a data set."""

    prompt_column: str = "prompt"
    answer_column: str | None = None
    """None: `answer`, or else `solution`, where the rows have it."""
    answers: Answers = "auto"
    """Form of a gold answer: a number, an expression that math-verify parses, or any text, of which two may be right.
    `auto`: a number where nine in ten are; short texts that differ contradict each other."""
    near: float | None = None
    """Share of runs of three words from which two prompts are the same; 0 looks for exact duplicates alone. None: 0.6 where
    the answers tell questions apart, 0.8 where there are none or the same few, as of multiple choice."""
    against: Sequence[str] = ()
    """Evaluation sets that the rows must not hold."""
    against_column: str | None = None
    """The column of their prompts; None: as `prompt_column`, or else `prompt`."""
    gram: int = 8
    """Words of a run that counts as taken from an evaluation question."""
    overlap: float = 0.5
    """Share of a prompt's words in such runs from which it is taken for an evaluation question."""
    tokenizer: Any = None
    max_prompt_length: int | None = None
    """Most tokens of a prompt; needs the tokenizer."""
    ignore: Sequence[str] = ()
    """Kinds of fault to skip."""

    def __post_init__(self) -> None:
        for name in self.ignore:
            if name not in KINDS:
                raise ConfigError(
                    f"{name!r} is no kind of fault.{did_you_mean(name, KINDS)} The kinds are {', '.join(KINDS)}."
                )
        if self.near is not None and not 0 <= self.near <= 1:
            raise ConfigError(f"near is {self.near}; it is a share of runs of words, from 0 (exact ones only) to 1.")
        if not 0 < self.overlap <= 1:
            raise ConfigError(f"overlap is {self.overlap}; it is a share of words, above 0 and up to 1.")
        if self.gram < 2:
            raise ConfigError(f"gram is {self.gram}; give 2 words or more, such as 8 or 13.")
        if self.answers not in ("auto", "number", "math", "text"):
            raise ConfigError(f"answers is {self.answers!r}; it is auto, number, math or text.")
        if (self.max_prompt_length is None) != (self.tokenizer is None):
            raise ConfigError("The length of prompts in tokens needs both a tokenizer and max_prompt_length.")

    @property
    def mended(self) -> list[str]:
        """The faults of text that are repaired."""
        return [fault for fault in FAULTS if fault not in self.ignore]

    def check_evaluation_sets(self, source: str) -> None:
        """Raise ConfigError when a set is held against itself."""
        for other in self.against:
            are_files = Path(other).exists() and Path(source).exists()
            if other == source or (are_files and Path(other).samefile(source)):
                raise ConfigError(
                    f"{source} is checked against itself; give an evaluation set of its own to --against."
                )
