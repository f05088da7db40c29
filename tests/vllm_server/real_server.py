"""A real vLLM server in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from covey.errors import ServerError
from covey.rollout.vllm.client import Address, Client
from covey.rollout.vllm.serving import serve_command

PYTHON = os.environ.get("COVEY_VLLM_PYTHON", sys.executable)
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", str(2**28), "--enforce-eager", "--max-model-len", "512")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Running:
    """A server in a process group of its own."""

    def __init__(self, folder: Path, model: str = "demo", lora_rank: int | None = 8, more: Sequence[str] = ()) -> None:
        self.folder, self.port, self.model, self.lora_rank = folder, free_port(), model, lora_rank
        self.more = (*SMALL, *more)
        self.start()

    def start(self, **more: str) -> None:
        """Start it, with these environment variables as well."""
        command, environment = serve_command(
            self.model, port=self.port, python=PYTHON, lora_rank=self.lora_rank, more=self.more
        )
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **more}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.wait()

    def wait(self) -> None:
        client = Client(Address.of(None, "127.0.0.1", self.port))
        try:
            client.wait_until_up(600, self.check)
        except ServerError as error:
            self.stop()
            raise AssertionError((self.folder / "server.log").read_text()[-3000:]) from error

    def check(self) -> None:
        assert self.process.poll() is None, (self.folder / "server.log").read_text()[-3000:]

    def tell(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Let it remove its shared memory, which a kill leaves in /dev/shm."""
        with contextlib.suppress(ProcessLookupError):
            self.tell(signal.SIGCONT)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.tell(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    found = Running(tmp_path_factory.mktemp("server"))
    yield found
    found.stop()
