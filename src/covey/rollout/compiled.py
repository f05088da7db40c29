"""The kernels of decode.cpp: compiled once by the machine's own C++ compiler, kept, and called on torch's memory.

Where there is no compiler, or no processor that they were written for, PyTorch's own operations do the same work.
"""

from __future__ import annotations

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
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from covey.errors import ConfigError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decode.cpp")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-w",
)
COMPILE_SECONDS = 120
SWITCH = "COVEY_CPU_KERNELS"
"""0 in the environment: never compile, never load."""

NUMBERS = {torch.float32: "float", torch.bfloat16: "bf16"}
WIDTHS = range(16, 257, 16)
"""Widths of heads that the kernels can be compiled for."""


class Step(ctypes.Structure):
    """What all layers of a decode step share; the same layout as in decode.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "heads", "repeats", "width", "column", "threads")),
        *((name, ctypes.c_void_p) for name in ("starts", "owners", "lengths", "places", "cosines", "sines")),
        *((name, ctypes.c_double) for name in ("scale", "epsilon")),
    )
    held: Tensor
    """What one of the pointers points to, if nobody else keeps it."""


class _Heads(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("by_row", ctypes.c_int64), ("by_head", ctypes.c_int64))

    @classmethod
    def of(cls, x: Tensor) -> _Heads:
        """`x` [R, H, D], contiguous in D."""
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class _Slab(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("by_kind", ctypes.c_int64),
        ("by_row", ctypes.c_int64),
        ("by_head", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> _Slab:
        """`x` [2, R, H, columns, D], contiguous in its last two."""
        return cls(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


class Kernels:
    """The compiled functions for one precision and one width of heads."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._attend = library.covey_attend
        self._attend.argtypes = [ctypes.c_void_p] * 9
        self._attend.restype = None
        self._add_norm = library.covey_add_norm
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._add_norm.argtypes = [pointer, pointer, pointer, pointer, size, size, ctypes.c_double, size]
        self._add_norm.restype = None

    def attend(
        self,
        step: Step,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Tensor,
        prompts: Tensor,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
    ) -> Tensor:
        """[R, Hq, D] from `query` [R, Hq, D], `key` and `value` [R, Hkv, D], which it also puts into `own`.

        `own` [2, >= R, Hkv, columns, D] and `prompts` [2, P, Hkv, columns, D] are the cache of one layer. Rows from
        `step.rows` on are zeros. The norms [D] float32 come before the rotation that `step` describes, if it does.
        """
        out = torch.empty(query.shape, dtype=query.dtype)
        out[step.rows :] = 0
        by = ctypes.byref
        self._attend(
            by(step),
            by(_Heads.of(query)),
            by(_Heads.of(key)),
            by(_Heads.of(value)),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            by(_Slab.of(own)),
            by(_Slab.of(prompts)),
            out.data_ptr(),
        )
        return out

    def add_norm(self, x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """[M, K] root-mean-square norm of `x` [M, K] float32 times `weight` [K] float32, after `x += update` in place."""
        out = torch.empty(x.shape, dtype=self.dtype)
        self._add_norm(
            x.data_ptr(),
            None if update is None else update.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            len(x),
            x.shape[1],
            epsilon,
            torch.get_num_threads(),
        )
        return out


def kernels_for(device: torch.device, dtype: torch.dtype, width: int) -> Kernels | None:
    """The kernels for heads of this width; None where they do not run."""
    if device.type != "cpu" or dtype not in NUMBERS or width not in WIDTHS:
        return None
    library = _library(dtype, width)
    return None if library is None else Kernels(library, dtype)


@functools.cache
def _library(dtype: torch.dtype, width: int) -> ctypes.CDLL | None:
    """The kernels, compiled if they were not before. None, and why as a line of the log, where that is not possible."""
    reason = why_not()
    if reason is None:
        try:
            return ctypes.CDLL(str(built(dtype, width)))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: this user has no home
            reason = (str(getattr(error, "stderr", None) or error).strip().splitlines() or ["it failed"])[0]
    logger.info("Decoding with PyTorch's own operations, not with compiled kernels: %s.", reason)
    return None


def why_not() -> str | None:
    """What keeps the kernels from being compiled here; None when nothing does. Raises ConfigError for a switch that says neither."""
    said = os.environ.get(SWITCH, "").strip()
    if said not in ("", "0", "1"):
        raise ConfigError(
            f"{SWITCH} is {said!r}; give 0 to decode without compiled kernels, 1 or nothing to decode with them."
        )
    if said == "0":
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


def _compiler() -> list[str] | None:
    """The command that compiles C++: what CXX says, or g++, or clang++."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["clang++"]]:
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    return None


def built(dtype: torch.dtype, width: int, more: Sequence[str] = ()) -> Path:
    """The library in the user's cache folder, compiled now if it is not there, with `more` flags.

    Raises OSError or SubprocessError.
    """
    compiler = _compiler()
    assert compiler is not None  # `why_not` has looked
    flags = [*FLAGS, f"-DNUMBER={NUMBERS[dtype]}", f"-DVECTORS={width // 16}", *more]
    target = cache_folder() / f"decode-{_fingerprint(compiler, flags)}.so"
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, "decode.so")
            # not linked with -fopenmp: the names are found in the runtime that torch has loaded, so threads are shared
            _compile([*compiler, *flags, "-c", str(SOURCE), "-o", f"{folder}/decode.o"])
            _compile([*compiler, "-shared", f"{folder}/decode.o", "-o", str(made)])
            made.replace(target)
    return target


def _compile(command: list[str]) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS, stdin=subprocess.DEVNULL
    )


def cache_folder() -> Path:
    """`~/.cache/covey`, which only this user may write to. Raises OSError when it is somebody else's."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covey"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others may write to {folder}, so nothing is loaded from it")
    return folder


def _fingerprint(compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Of all that the library hangs on: source, flags, compiler, processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line for line in lines if line.startswith(("flags", "model name"))][:2]  # of the first core
    known = [
        SOURCE.read_text(),
        *flags,
        *compiler,
        str(Path(compiler[0]).resolve()),
        str(os.stat(compiler[0]).st_mtime_ns),
        *cpu,
    ]
    return hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]
