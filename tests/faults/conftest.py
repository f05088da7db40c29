"""Real faults: a disk that is really full, a process that is really killed, a system call that really fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import can_mount
from saving import Saver

SIZE = "400k"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 400 kB of its own."""
    if not can_mount():
        if can_mount("unshare", "-rm"):
            yield tmp_path  # the whole test runs again where a mount is possible: see pytest_pyfunc_call
            return
        pytest.skip("neither mount nor `unshare -rm mount` is permitted here")
    folder = tmp_path / "small-disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that needs a mount in a user namespace of its own, when this process may not mount."""
    if "small_disk" not in pyfuncitem.fixturenames or can_mount():
        return None
    command = ["unshare", "-rm", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    """Runs saves in processes of their own, under strace; skips where that is not permitted."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-f", "true"], capture_output=True).returncode != 0:
        pytest.skip("strace is not permitted here")
    with Saver() as saver:
        yield saver
