"""Output of the command line: the result on stdout, all else on stderr, terminal control characters removed."""

import json
import logging
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any

from covey.errors import StorageError
from covey.files.bounded import finite
from covey.process.counting import Counter
from covey.process.terminal import safe
from covey.runs.console import Lasting, to_nowhere

_WIDTH = 110
"""Most columns of a row; a narrower terminal gets its own."""
counter = Counter()
"""The live line on stderr, cleared before any other output."""


def result(text: str) -> None:
    """Print the result of a command on stdout. Raises StorageError where stdout is a file and the disk is full."""
    counter.clear()
    try:
        sys.stdout.write(safe(text) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise StorageError(f"the result cannot be written to stdout: {error.strerror or error}.") from error


def drop_stdout() -> None:
    """Drop buffered output of stdout: Python would flush it again at exit, and complain."""
    to_nowhere(sys.stdout)


def result_json(value: Any) -> None:
    """Print the result of a command as one JSON object on one line; a number that is not finite is null."""
    result(json.dumps(finite(value), default=str, allow_nan=False))


def answer(args: Mapping[str, Any], facts: Any, sentence: str) -> None:
    """Print the result of a command: the facts with `--json`, else the sentence."""
    result_json(facts) if args.get("json") else result(sentence)


def say(text: str) -> None:
    """A message to the user on stderr; lost where the terminal is gone."""
    counter.clear()
    stream = Lasting(sys.stderr)
    stream.write(safe(text) + "\n")
    stream.flush()


def say_on_main(text: str) -> None:
    """A message of a run, which its main process alone says."""
    if int(os.environ.get("RANK", "0") or 0) == 0:
        say(text)


class LogToStderr(logging.Handler):
    """Log records as lines of words: `warning: ...`."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno == logging.INFO else record.levelname.lower() + ": "
        say(prefix + record.getMessage())


def start_logging() -> None:
    """Show Covey's own log and Python's warnings on stderr, a line each; warnings for developers are left out."""
    logger = logging.getLogger("covey")
    if not any(isinstance(handler, LogToStderr) for handler in logger.handlers):
        logger.addHandler(LogToStderr())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # 4-bit products on a CPU, which Covey does not use
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = lambda message, *where, **more: say(f"warning: {message}")


def row(status: str, area: str, sentence: str, fix: str | None = None) -> None:
    """Print `WARN  model        the sentence` as a result, with the fix below it."""
    start = f"{status}  {area:<12} "
    lines = textwrap.wrap(sentence, width(), initial_indent=start, subsequent_indent=" " * len(start))
    if fix:
        indent = " " * len(start) + "-> "
        lines += textwrap.wrap(fix, width(), initial_indent=indent, subsequent_indent=" " * len(indent))
    result("\n".join(lines))


def width() -> int:
    """Columns of the terminal, between 50 and `_WIDTH`."""
    return max(min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns), 50)
