"""stdout and stderr that last as long as a run: a closed terminal, a pipe without reader or a full disk end no training."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ESHUTDOWN, errno.ECONNRESET)


class Lasting:
    """A text stream that drops output its own stream refuses. After its reader is gone, it writes to the null device."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._taken():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._taken():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the stream was closed in Python
            if isinstance(error, OSError) and error.errno in _GONE:
                to_nowhere(self._stream)


def to_nowhere(stream: Any) -> None:
    """Redirect the stream's file descriptor to the null device, where there is one: buffered output, ours or a library's, is dropped."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_closed() -> None:
    """Open what was closed before Python began (`>&-`) on the null device, or the next file that is opened would be stdout."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """While entered, what is printed to stdout and stderr never raises; progress is given up before training is."""
    open_closed()
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    mine = {name: Lasting(stream) for name, stream in before.items()}
    for name, stream in mine.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in mine.items():
            if getattr(sys, name) is stream:
                stream.flush()
                setattr(sys, name, before[name])
