"""Errors for wrong input: one sentence that says what is wrong, where, and the fix. Each class carries the CLI's exit code.

A wrong argument is a ValueError too, and a TypeError where TRL raises one, so that scripts that catch these go on to work.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class CoveyError(Exception):
    """Base of everything Covey raises on purpose. The message is one clear sentence that names the input and the fix."""

    exit_code = 1


class ConfigError(CoveyError, ValueError):
    """An option that does not exist, contradicts another, or cannot be honoured."""

    exit_code = 2


class ArgumentTypeError(ConfigError, TypeError):
    """An argument that does not exist, or has the wrong type."""


class NotOfferedError(ConfigError, RuntimeError):
    """A method of TRL's or transformers' trainer that has another form here."""


class DataError(CoveyError, ValueError):
    """A data set that cannot be used as given."""

    exit_code = 2


class DataTypeError(DataError, TypeError):
    """Something given as a data set that is none."""


class MissingKeyError(DataError, KeyError):
    """A data set without a column that is needed, or a dict of data sets without one that is named."""

    __str__ = Exception.__str__  # a KeyError's is in quotation marks


class ModelError(CoveyError, ValueError):
    """A model or tokenizer that cannot be loaded or used as given."""

    exit_code = 2


class TokenizerTypeError(ModelError, TypeError):
    """A `processing_class` that is no tokenizer."""


class TooLongError(ValueError):
    """A text with more tokens than a reward's model reads. In a run its completion gets no score."""


class Unsupported(ModelError):  # noqa: N818  # the name others rely on
    """The native engine cannot run this model exactly; the message is the reason."""


class MediaUnsupported(Unsupported):
    """It cannot compute images, sounds or videos of this model."""


class RunFolderError(CoveyError, ValueError):
    """An output folder that holds something else, or cannot be written."""

    exit_code = 2


class RewardError(CoveyError, ValueError):
    """A reward that is not callable, returns the wrong number of values, or failed too often.

    `events`: each a `covey.types.Event`, to be written to the run folder's `events.jsonl`.
    """

    exit_code = 3

    def __init__(self, message: str = "", events: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.events = tuple(events)


class CheckpointError(CoveyError, ValueError):
    """No usable checkpoint where one was asked for."""

    exit_code = 4


class NumericsError(CoveyError):
    """Numbers went bad more often than the run may skip."""

    exit_code = 70


class SpoiledError(NumericsError):
    """Weights or other state of training hold NaN, infinity or absurd values: the run goes back to a checkpoint, or ends."""


class MemoryLimitError(CoveyError):
    """The smallest piece of work does not fit in memory."""

    exit_code = 71


class InvariantError(CoveyError):
    """An invariant of the run is broken (something changed that must not); no checkpoint is written."""

    exit_code = 72


class StorageError(CoveyError):
    """The disk refused: full, read-only or failing."""

    exit_code = 74


class ServerError(CoveyError):
    """A server of completions that is gone, hangs, refuses, or serves other weights than it should."""

    exit_code = 73


class AttestationError(ServerError):
    """A server answers with other weights than those that the trainer sent."""


class RankError(CoveyError):
    """Another process of the run is gone, hangs, or does something else than this one."""

    exit_code = 76


_LONGEST_NAME = 200
"""Characters of a word that is compared with names; a longer one is no misspelling, and comparing takes their square."""


def did_you_mean(word: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A sentence with the nearest known name, or an empty string. `cutoff`: least similarity, up to 1.

    >>> did_you_mean("epsilon_hihg", ["epsilon", "epsilon_high"])
    ' Did you mean epsilon_high?'
    """
    if len(word) > _LONGEST_NAME:
        return ""
    near = difflib.get_close_matches(word, list(names), n=3, cutoff=cutoff)
    near.sort(key=lambda name: sorted(name) != sorted(word))  # letters that changed places
    return f" Did you mean {near[0]}?" if near else ""


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Imports of a package that comes with an extra of Covey. ConfigError, where it is not installed, says `what` needs it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what}: pip install 'covey[{extra}]'.") from error


def first_line(error: BaseException) -> str:
    """First line of an error's message that is not empty; its type's name where there is no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def message_of(error: BaseException, most: int = 200) -> str:
    """An error's message on a single line, of at most so many characters."""
    return " ".join(str(error).split())[:most]


RAW_ERRORS = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, RuntimeError, AssertionError)
"""Exceptions of a model's own code that is called in another way than it expects. A RuntimeError may say that memory ran out."""
