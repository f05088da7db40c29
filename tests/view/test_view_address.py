"""The address of the page is told once it answers, and a port in use is one sentence."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from covey.cli import main
from covey.runs.metrics import JsonLines

CODE = "import sys; from covey.cli import main; sys.exit(main(sys.argv[1:]))"


def run_in(folder: Path) -> Path:
    (folder / "run").mkdir()
    JsonLines(folder / "run" / "metrics.jsonl").append({"step": 1, "reward": 0.5})
    return folder


def test_the_address_that_is_printed_answers_at_once_and_without_pytorch(tmp_path: Path) -> None:
    """Files are shown: what takes seconds to import has no part in it."""
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.modules['torch'] = None; {CODE}",
        "view",
        str(run_in(tmp_path)),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].split()[0]
            for call in ("runs", "prompts?run=run", "rollouts?run=run", "series?run=run&metric=reward"):
                with urllib.request.urlopen(f"{address}api/{call}", timeout=60) as reply:
                    assert reply.status == 200
        finally:
            server.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_headers_that_never_end_are_cut_off(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, "view", str(run_in(tmp_path)), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = urlsplit(server.stdout.readline().split(" at ")[1].split()[0])
            with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
                assert connection.recv(1000) == b""
        finally:
            server.send_signal(signal.SIGINT)


@pytest.mark.parametrize("listens", [True, False])
def test_a_port_in_use_is_one_sentence(listens: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        port = taken.getsockname()[1]
        assert main(["view", str(run_in(tmp_path)), "--port", str(port)]) == 2
    told = capsys.readouterr()
    assert "http://" not in told.out
    assert f"port {port} cannot be listened on" in told.err
    assert "Traceback" not in told.err
