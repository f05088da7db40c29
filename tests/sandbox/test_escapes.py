"""Nothing gets out: as this user, as nobody, and with one layer of the isolation after another missing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.sandbox import Result, Sandbox
from covey.sandbox.jail import START
from kit import rest_nightly
from sandbox.escapes import CANARY, GREEDY, KERNEL, READING, WRITING

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can isolate")
SOURCE = Path(__file__).parents[2] / "src"
LAYERS = {
    "all layers": ("namespaces", "landlock", "seccomp"),
    "no namespaces": ("landlock", "seccomp"),
    "namespaces alone": ("namespaces",),
    "no landlock": ("namespaces", "seccomp"),
}


class World:
    """A user's file, and listeners on loopback and on a Unix socket, which count who comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "secret"
        self.restore()
        self.visitors = 0
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.unix.listen()
        for listener in (self.tcp, self.unix):
            threading.Thread(target=self._count, args=(listener,), daemon=True).start()

    def _count(self, listener: socket.socket) -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return
            self.visitors += 1

    def restore(self) -> None:
        self.file.write_text(CANARY)
        self.file.chmod(0o666)
        self.folder.chmod(0o777)

    def close(self) -> None:
        for listener in (self.tcp, self.unix):
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def program(self, code: str) -> str:
        port, where = self.tcp.getsockname()[1], str(self.folder / "socket")
        for name, value in (("port", port), ("pid", os.getpid())):
            code = code.replace(f"{{{name}}}", str(value))
        for name, text in (("file", self.file), ("folder", self.folder), ("socket", where)):
            code = code.replace(f"{{{name}!r}}", repr(str(text)))
        return code


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    folder = Path("/var/tmp") / f"covey-world-{os.getpid()}"  # not below /tmp, which the sandbox replaces
    folder.mkdir()
    os.environ["COVEY_SECRET"] = CANARY
    world = World(folder)
    yield world
    world.close()
    del os.environ["COVEY_SECRET"]
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=list(LAYERS))
def run(request: pytest.FixtureRequest) -> Iterator[object]:
    with Sandbox(1, layers=LAYERS[request.param]) as sandbox:
        assert sandbox.isolation.layers == LAYERS[request.param]
        yield lambda code, timeout=10.0: sandbox.run(code, timeout=timeout, memory_mb=128)


@pytest.mark.parametrize("what", READING)
def test_a_program_cannot_see(what: str, run, world: World) -> None:
    result = run(world.program(READING[what]))
    assert CANARY not in result.stdout + result.stderr
    assert "GOT" not in result.stdout
    assert world.visitors == 0


MEMORY = (
    "import gc, os, sys, types\nfound = [*sys.argv, *sys.orig_argv, *sys.path, sys.executable, sys.prefix, *os.environ.values(), os.getcwd()]\n"
    "frame = sys._getframe()\nwhile frame: found += [frame.f_code.co_filename, *frame.f_locals.values()]; frame = frame.f_back\n"
    "for o in gc.get_objects():\n    found += gc.get_referents(o)\n"
    "found += [o.co_filename for o in found if isinstance(o, types.CodeType)]\n"
    "texts = {o if isinstance(o, str) else o.decode('latin-1') for o in found if isinstance(o, (str, bytes, bytearray))}\n"
    "print('FOUND', [w for w in {words!r} if any(w[::-1] in text for text in texts)], len(texts))\n"
)
"""The texts that Python's own means find in the process, searched for words that stand here backwards."""
STACK = (
    "import ctypes\nenviron = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'environ').value\n"
    "first = ctypes.c_void_p.from_address(environ).value or environ\n"
    "data = ctypes.string_at((first & ~4095) - 8192, 8192 + (first & 4095))\n"
    "print('FOUND', [w for w in {words!r} if w[::-1].encode() in data], len(data))\n"
)
"""The part of the stack where arguments were put when the process was started."""


@pytest.mark.parametrize("code", [MEMORY, STACK], ids=["objects", "the stack"])
def test_nothing_of_the_run_is_left_in_a_programs_memory(code: str) -> None:
    words = [str(SOURCE), str(Path(__file__).parent), "covey/sandbox", f'"parent": {os.getpid()}', '"slot": ']
    with Sandbox(1) as sandbox:
        result = sandbox.run(
            code.replace("{words!r}", repr([word[::-1] for word in words])), timeout=30, memory_mb=1024
        )
    assert result.stdout.startswith("FOUND [] "), result


@pytest.fixture(scope="module")
def whole() -> Iterator[Sandbox]:
    with Sandbox(1) as sandbox:
        yield sandbox


@pytest.mark.parametrize("what", KERNEL)
def test_a_program_gets_no_privilege(what: str, whole: Sandbox, world: World) -> None:
    result = whole.run(KERNEL[what], timeout=4)
    assert "GOT" not in result.stdout
    assert result.reason in ("passed", "error")


@pytest.mark.parametrize("what", WRITING)
def test_a_program_cannot_change(what: str, run, world: World) -> None:
    library = Path(os.__file__)
    before = (library.read_bytes(), sorted(os.listdir(library.parent)), sorted(os.listdir("/var/tmp")))
    run(world.program(WRITING[what]))
    assert world.file.read_text() == CANARY
    assert sorted(path.name for path in world.folder.iterdir()) == ["secret", "socket"]
    assert (library.read_bytes(), sorted(os.listdir(library.parent)), sorted(os.listdir("/var/tmp"))) == before


@pytest.mark.parametrize("run", rest_nightly(["all layers", "no namespaces"], 1), indirect=True)
@pytest.mark.parametrize(
    "what",
    rest_nightly(
        GREEDY,
        [name for name in GREEDY if name not in ("an endless loop", "a number too large", "a regular expression")],
    ),
)
def test_a_program_cannot_use_up(what: str, run) -> None:
    code, reasons = GREEDY[what]
    result: Result = run(code, timeout=0.3 if "timeout" in reasons else 10.0)
    assert result.reason in reasons, result
    assert not result.passed
    assert run("print(6 * 7)").stdout == "42\n"  # and the next one is none the wiser


def test_the_run_cannot_be_killed_from_inside(run) -> None:
    for target in ("os.getppid()", "1", "-1", "0", str(os.getpid())):
        run(f"import os, signal\nos.kill({target}, signal.SIGKILL)")
    assert run("print(6 * 7)").stdout == "42\n"


def test_a_program_leaves_nothing_for_the_next(run) -> None:
    run("open('/tmp/note', 'w').write('from the first')")
    assert not run("print(open('/tmp/note').read())").passed


@pytest.mark.parametrize("layers", [LAYERS["all layers"], LAYERS["namespaces alone"]])
def test_daemons_end_with_their_program(layers: tuple[str, ...]) -> None:
    daemon = "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(300)\nprint('left')"
    others = _jails(os.getpid())
    with Sandbox(1, layers=layers) as sandbox:
        sandbox.run("pass")
        before = _jails(os.getpid())
        assert before - others
        sandbox.run(daemon, timeout=0.5)
        assert _until(lambda: _jails(os.getpid()) == before)
    assert _until(lambda: _jails(os.getpid()) == others)


def test_workers_end_with_the_run_that_was_killed() -> None:
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from covey.sandbox import Sandbox\nsandbox = Sandbox(2)\nsandbox.run('pass'); print('up', flush=True); sandbox.run('while True: pass', timeout=100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        jails = _jails(child.pid)
        assert jails
        child.kill()
    assert _until(lambda: not any(map(_is_jail, jails)))


def _jails(run: int) -> set[int]:
    """Processes of the sandboxes of the process `run`, programs in them included: those below it that run `START`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
    below = {run}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    return {process for process in below if _is_jail(process)}


def _is_jail(process: int) -> bool:
    try:
        return START.encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _until(condition) -> bool:
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_nothing_gets_out_as_nobody_either(tmp_path: Path, world: World) -> None:
    """The user without any right is the one that most containers run as."""
    if os.getuid() != 0:
        pytest.skip("only root can become nobody")
    python = _python_for_nobody()
    copy = Path("/var/tmp") / f"covey-copy-{os.getpid()}"
    shutil.copytree(SOURCE / "covey", copy / "covey", ignore=shutil.ignore_patterns("__pycache__"))
    programs = {name: world.program(code) for group in (READING, WRITING) for name, code in group.items()}
    asked = {name: (code, 10.0) for name, code in programs.items()}
    greedy = {name: (code, 1.0 if "timeout" in reasons else 10.0) for name, (code, reasons) in GREEDY.items()}
    driver = (
        "import json, sys\nfrom covey.sandbox import Sandbox\nsandbox = Sandbox(2)\nasked = json.load(sys.stdin)\n"
        "def told(r): return [r.reason, r.stdout, r.stderr]\n"
        "print(json.dumps([sandbox.isolation.layers, {n: told(sandbox.run(c, timeout=t)) for n, (c, t) in asked.items()}]))"
    )
    try:
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", driver],
            input=json.dumps({**asked, **greedy}),
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(copy), "COVEY_SECRET": CANARY, "PATH": "/usr/bin:/bin"},
            cwd="/",
        )
    finally:
        shutil.rmtree(copy)
    assert done.returncode == 0, done.stderr
    layers, results = json.loads(done.stdout)
    assert layers == ["namespaces", "landlock", "seccomp"]
    for name, (_, printed, errors) in results.items():
        assert CANARY not in printed + errors, name
        assert "GOT" not in printed, name
    assert {name for name in greedy if results[name][0] not in GREEDY[name][1]} == set()
    assert world.file.read_text() == CANARY
    assert world.visitors == 0


def _python_for_nobody() -> str:
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-S", "-c"]
        check = [*command, "import sys; sys.exit(sys.version_info < (3, 10) or not sys.executable)"]
        if subprocess.run(check, capture_output=True).returncode == 0 and python != sys.executable:
            return python
    pytest.skip("nobody cannot run any Python on this machine")
