"""The command line: `covey VERB ...`. A verb is one small file, imported when it is called."""

import importlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from covey import __version__, expect_docstrings
from covey.cli import output
from covey.cli.help import verbs_help
from covey.errors import ConfigError, CoveyError, StorageError, did_you_mean
from covey.process.counting import heard_by
from covey.process.importing import show_imports
from covey.runs.console import open_closed

VERBS = {
    "demo": "see a small model learn by GRPO on this machine, in minutes, without network",
    "init": "a project to start from: data, a reward, a configuration, tests that pass",
    "train": "post-train a model on your data with your rewards",
    "recipes": "options for a model on given hardware, with planned seconds and memory",
    "sft": "fine-tune a model on right answers, before or without a reward",
    "tune": "try options in many runs, end the hopeless early, keep the best",
    "doctor": "what is wrong with a run before you pay for it: model, data, rewards, memory, time, signal",
    "eval": "accuracy, reward and pass@k of a model, with intervals; compare two models",
    "data": "faults of a data set, row by row; a copy without them; turns of expert trajectories as prompts",
    "reward": "whether a reward pays right answers and nothing else; a reward model trained on pairs",
    "features": "describe a data set's rows in columns: length, language, how often a model solves them",
    "serve-vllm": "start a vLLM server whose weights a run can update and prove",
    "attest": "whether a running server computes with the weights of a folder, by its log-probabilities",
    "view": "look at runs in the browser: curves, alerts, completions, differences",
    "compare": "differences of runs, their learning curves, and which is better, over seeds",
    "plot": "curves, reward shares and verdicts of runs as a picture or a page",
    "report": "one page of a run to share",
    "why": "a bad step replayed with one change at a time: which change removes the trouble",
    "chat": "talk to a model, an adapter or a checkpoint in the terminal",
    "serve": "an OpenAI-compatible endpoint of a model or a run, which may learn from scores",
    "feedback": "a score for an answer of covey serve --learn; the state of learning; rollback",
    "export": "a run's results for other tools: merged weights, an adapter, GGUF; preference pairs",
    "merge": "an adapter added into its base, or several models or adapters merged into one",
    "checkpoints": "checkpoints of a run: list, verify, prune, repair",
    "env": "versions and devices, for a bug report; env check examines an environment",
    "completion": "verbs and options for the Tab key of bash, zsh or fish",
}
"""Each is `covey.cli.<name>` with a `verb` in it."""
_PATIENCE_SECONDS, _LONGEST_EXIT_SECONDS = 60.0, 1800.0
"""Seconds after which an exit that is held up is reported, and ended; the second leaves time to upload a model."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb. Returns the exit code: 0 done, 1 unexpected, 2 wrong input, 130 interrupted, others by kind of error.

    The result goes to stdout, all else to stderr.
    """
    before = sys.excepthook
    code = 1  # of an unexpected exception, which Python shows and which leaves the same threads and libraries behind
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.excepthook = before
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        if arguments is None:
            _end_in_time(code)
    return code


def _end_in_time(code: int) -> None:
    """End this process, which has no more to do, whatever holds its exit up: a tracker's library waits hours for a server that hangs."""

    def end() -> None:
        time.sleep(_PATIENCE_SECONDS)
        output.say(
            "The command has ended, but a library holds this process up, such as a tracker that still sends its part. "
            f"It ends in {(_LONGEST_EXIT_SECONDS - _PATIENCE_SECONDS) / 60:.0f} minutes at the latest; Ctrl-C ends it now."
        )
        time.sleep(_LONGEST_EXIT_SECONDS - _PATIENCE_SECONDS)
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def _main(words: list[str]) -> int:
    open_closed()
    is_debug = "--debug" in words
    sys.excepthook = sys.__excepthook__ if is_debug else _say_briefly
    try:
        with heard_by(output.counter):
            return _run(words)
    except CoveyError as error:
        if is_debug:
            raise
        output.say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        output.say("Interrupted.")
        return 130
    except BrokenPipeError:  # the reader of stdout has gone, as in `covey env | head -1`
        output.drop_stdout()
        return 141
    except Exception as error:
        reason = None if is_debug else _disk_refuses(error)
        if reason is None:
            raise
        output.say(f"error: {reason}")
        return StorageError.exit_code


def _run(words: list[str]) -> int:
    if words[0:1] == ["help"] and words[1:2]:
        words = [words[1], "--help"]
    if words[0:1] == ["--debug"]:
        words = [*words[1:], "--debug"]
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        output.result(verbs_help(VERBS, __version__))
        return 0 if words else 2
    if name in ("--version", "version"):
        output.result(__version__)
        return 0
    if name not in VERBS:
        raise ConfigError(f"covey has no verb {name!r}.{did_you_mean(name, VERBS)} It has {', '.join(VERBS)}.")
    expect_docstrings()
    if "--debug" not in words:
        output.start_logging()
        show_imports(output.counter)
    return int(importlib.import_module(f"covey.cli.{name.replace('-', '_')}").verb(words[1:]))


def _disk_refuses(error: Exception) -> str | None:
    """Sentence for an OSError of a full, read-only or failing disk at an unforeseen place; None for any other error."""
    from covey.runs.disk import DISK
    from covey.runs.storage import why_refused

    reason = why_refused(error, DISK)
    place = getattr(error, "filename", None)
    return (
        reason
        and f"a file could not be written{f' to {place}' if place else ''}: {reason}. Free some space, and start again."
    )


def _say_briefly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    output.say(
        f"unexpected {kind.__name__}: {error}\nThis is a bug in Covey or in code that it called; --debug shows where."
    )
