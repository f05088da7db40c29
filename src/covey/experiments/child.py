"""One `covey train` in a process of its own, so that leaked state and crashes do not reach the next one."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import ConfigError
from covey.runs.signals import StopRequest

_LOOK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of the process: its exit code. `result` is the object that `--json` prints; empty where there was none."""

    code: int
    result: Mapping[str, Any] = field(default_factory=dict)


def train(
    arguments: Sequence[str],
    log: Path,
    stop: StopRequest,
    *,
    is_quiet: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run it to its end. Its stdout goes to `log`, and with `is_quiet` its stderr too.

    A signal that asks this process to stop is handed on, so that the run saves a checkpoint; `is_over` returning True asks
    it to stop likewise.
    """
    words = [sys.executable, "-m", "covey", "train", *arguments, "--json"]
    with log.open("ab") as file:
        start = file.tell()
        errors = subprocess.STDOUT if is_quiet else None
        # a session of its own: Ctrl-C would reach it twice, once from the terminal and once from here
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=errors, start_new_session=True)
        try:
            is_signalled = False
            while process.poll() is None:
                if not is_signalled and (stop.signal is not None or is_over()):
                    process.send_signal(stop.signal or signal.SIGTERM)
                    is_signalled = True
                time.sleep(_LOOK_SECONDS)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return Ended(code=process.returncode, result=_last_object(log, start))


def _last_object(log: Path, start: int) -> dict[str, Any]:
    """The JSON object on the last line that holds one, of what was written from `start` on."""
    for line in reversed(log.read_bytes()[start:].decode(errors="replace").splitlines()):
        if line.startswith('{"run"'):
            try:
                result = json.loads(line)
            except ValueError:  # a reward printed something that looks like it
                continue
            return dict(result)
    return {}


@contextmanager
def options_file(text: str) -> Iterator[str]:
    """A YAML file that only this user can read, for as long as it is needed: options may hold secrets."""
    descriptor, name = tempfile.mkstemp(suffix=".yaml", prefix="covey-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        yield name
    finally:
        os.unlink(name)


def refuse_launcher(flag: str) -> None:
    """Raise ConfigError in one of several processes of a launcher: each would start every run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"{flag} starts runs of its own, one process each; start it without accelerate launch or torchrun."
        )
