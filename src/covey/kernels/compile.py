"""Compile-and-cache for the C++ kernels: built once by the machine's own compiler, checked against PyTorch, loaded by ctypes.

Without a compiler, or on another processor, PyTorch's operations do the same work.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from covey.errors import ConfigError

logger = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own variable; Triton's code goes to a folder below, unless TRITON_CACHE_DIR says otherwise."""


@functools.cache
def keep_compiled_code() -> Path | None:
    """Let torch.compile keep its code in the user's cache folder, where a later process finds it; torch's default is `/tmp`.

    Returns the folder; None if it cannot be written, or may be written by others. A folder that the user names stays.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = os.environ.get(VARIABLE)
    if named and named != default_cache_dir():  # which torch writes there where it is imported
        return Path(named)
    try:
        folder = cache_folder() / "compiled"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        logger.warning("GPU code is compiled again by every process that starts after a reboot: %s.", error)
        return None
    os.environ[VARIABLE] = str(folder)
    return folder


K = TypeVar("K")

HEADERS = Path(__file__).parent / "cpp"
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-w",
)  # fmt: skip
COMPILE_SECONDS = 600
"""Many times what an idle core takes: a kernel that a busy machine compiles is there for good, one that is ended never."""
SWITCH = "COVEY_CPU_KERNELS"
"""Environment variable; 0: compile and load nothing."""

NUMBERS = {torch.float32: "float", torch.bfloat16: "bf16"}
"""C++ type names of the dtypes that kernels are compiled for."""


@functools.cache
def load(source: Path, defines: tuple[str, ...], doing: str) -> ctypes.CDLL | None:
    """The shared library of `source` with these macros, compiled if it is not cached.

    None if that is impossible; the log gives the reason, and names the work (`doing`) that PyTorch does instead.
    """
    reason = unavailable_reason()
    if reason is not None:
        _log_unavailable(reason)
        return None
    try:
        return ctypes.CDLL(str(built(source, defines)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
        message = (str(getattr(error, "stderr", None) or error).strip().splitlines() or ["it failed"])[0]
        is_late = isinstance(error, subprocess.TimeoutExpired)
        message = (
            f"the compiler took over {COMPILE_SECONDS} seconds; the next start tries again" if is_late else message
        )
        log_fallback(doing, message, logging.WARNING if is_late else logging.INFO)
    return None


@functools.cache
def _log_unavailable(reason: str) -> None:
    """Log once, for all kernels, that none of them can run here."""
    logger.info("Computing with PyTorch's own operations, not with compiled kernels: %s.", reason)


def load_verified(
    source: Path,
    defines: tuple[str, ...],
    doing: str,
    make: Callable[[ctypes.CDLL], K],
    gap: Callable[[K], float],
    most: float,
    what: str,
) -> K | None:
    """`make(library)` for the library of `source`, if its error `gap` against PyTorch is below `most`.

    None otherwise; the log gives the reason, and names the work (`doing`) that PyTorch does instead. `what` names the compared results.
    """
    library = load(source, defines, doing)
    if library is None:
        return None
    made = make(library)
    # the first request may come from inside torch.device("meta") or autocast
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        far = gap(made)
    if far < most:
        return made
    log_fallback(doing, f"{what} by {far:.1g}")
    return None


def largest_gap(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest absolute error of any pair, relative to the largest expected number of that pair."""
    gaps = [(result.float() - two).abs().max() / two.abs().max() for result, two in zip(results, expected, strict=True)]
    return float(torch.stack(gaps).max())


def log_fallback(doing: str, reason: object, level: int = logging.WARNING) -> None:
    """Log that PyTorch's operations do this work, and the reason."""
    logger.log(level, "%s with PyTorch's own operations, not with compiled kernels: %s.", doing, reason)


def unavailable_reason() -> str | None:
    """Reason why C++ kernels cannot run here; None if they can. Raises ConfigError unless `COVEY_CPU_KERNELS` is 0 or 1."""
    setting = os.environ.get(SWITCH, "").strip()
    if setting not in ("", "0", "1"):
        raise ConfigError(
            f"{SWITCH} is {setting!r}; give 0 to compute without compiled kernels, 1 or nothing to compute with them."
        )
    if setting == "0":
        return f"{SWITCH} is 0"
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return f"they are written for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "they need a processor with AVX2"
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return "torch has loaded no OpenMP runtime that they could share"
    if _compiler() is None:
        return "there is no C++ compiler (install g++)"
    return None


def is_fake(x: Tensor) -> bool:
    """True for a fake tensor (a shape without storage), as in a dry run; PyTorch's operations handle it."""
    return isinstance(x, FakeTensor)


def has_amx() -> bool:
    """True on a processor with Advanced Matrix Extensions."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def _compiler() -> list[str] | None:
    """The C++ compiler's command: `CXX`, else g++, else clang++."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["clang++"]]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    return None


def built(source: Path, defines: Sequence[str], more: Sequence[str] = ()) -> Path:
    """The library in the user's cache folder, compiled now if it is not there, with `more` flags.

    Raises OSError or SubprocessError.
    """
    compiler = _compiler()
    assert compiler is not None  # `unavailable_reason` has looked
    flags = [*FLAGS, *(f"-D{name}" for name in defines), *more]
    target = cache_folder() / f"{source.stem}-{_fingerprint(source, compiler, flags)}.so"
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, "kernels.so")
            # not linked with -fopenmp: the names are found in the runtime that torch has loaded, so threads are shared
            compile_ = [*compiler, *flags, f"-I{HEADERS}", "-c", str(source), "-o", f"{folder}/kernels.o"]
            _compile(compile_)
            _compile([*compiler, "-shared", f"{folder}/kernels.o", "-o", str(made)])
            made.replace(target)
    return target


def _compile(command: list[str]) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS, stdin=subprocess.DEVNULL
    )


def cache_folder() -> Path:
    """`~/.cache/covey`, writable by this user only. Raises OSError if others may write to it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covey"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others may write to {folder}, so nothing is loaded from it")
    return folder


def _fingerprint(source: Path, compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Hash of everything the library depends on: sources, flags, compiler, processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line for line in lines if line.startswith(("flags", "model name"))][:2]  # of the first core
    inputs = [
        source.read_text(),
        *(header.read_text() for header in sorted(HEADERS.glob("*.h"))),
        *flags,
        *compiler,
        str(Path(compiler[0]).resolve()),
        str(os.stat(compiler[0]).st_mtime_ns),
        *cpu,
    ]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
