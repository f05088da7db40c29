"""A process that forks one child a save: stopped before its first system call, so that strace sees the save and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from forked import Forked

SERVER = """
import os, signal, sys, tempfile, warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from covey.errors import StorageError
from covey.runs import checkpoint

def save(run, step):
    def write(folder):
        save_file({"weight": torch.full((256,), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}" + " " * 2000)

    checkpoint.save(Path(run), step, write, {"step": step, "x": torch.full((64,), step)}, keep=1)

with tempfile.TemporaryDirectory() as warm:
    save(warm, 1)
    save(warm, 2)
print("ready", flush=True)
for line in sys.stdin:
    run, first, last = line.split()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            for step in range(int(first), int(last) + 1):
                save(run, step)
        except StorageError as error:
            (Path(run).parent / "refused").write_text(str(error))
            os._exit(74)
        os._exit(0)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
CALLS = "openat,write,pwrite64,ftruncate,fsync,rename,renameat,renameat2,mkdir,unlink,unlinkat,rmdir"


class Saver:
    """Asks the server for saves. Use as a context manager."""

    words: tuple[str | Path, ...] = ("-c", SERVER)
    """The server: it answers a line `RUN FIRST LAST` with the id of a child that stops itself before it begins."""

    def __enter__(self) -> Saver:
        requests, ours = os.pipe()
        theirs, answers = os.pipe()
        self.server = Forked(*self.words, stdin=requests, stdout=answers)
        os.close(requests)
        os.close(answers)
        self.requests, self.answers = open(ours, "w"), open(theirs)
        assert self._answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self.requests.close()
        self.server.wait()
        self.answers.close()

    def _answer(self) -> str:
        return self.answers.readline().strip()

    def start(self, run: Path, first: int, last: int) -> int:
        """The id of a stopped process that, when continued, saves checkpoints `first` to `last` in `run`."""
        self.requests.write(f"{run} {first} {last}\n")
        self.requests.flush()
        child = int(self._answer())
        wait_until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        return child

    def finish(self) -> int:
        """The exit code of the save, negative when a signal ended it."""
        return int(self._answer())

    def save(self, run: Path, step: int, *options: str) -> int:
        """Save `checkpoint-<step>` under strace with these options; the exit code."""
        child = self.start(run, step, step)
        command = ["strace", "-qq", "-y", "-p", str(child), *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tracer:
            wait_until(lambda: "TracerPid:\t0" not in Path(f"/proc/{child}/status").read_text())
            os.kill(child, signal.SIGCONT)
            code = self.finish()
            tracer.wait()
        return code


def wait_until(condition: object, seconds: float = 120.0) -> None:
    """Wait for something another process does."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the other process did not get there"
        time.sleep(0.001)
