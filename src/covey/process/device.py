"""Device of a run: the requested one, else the accelerator, else the CPU."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import ClassVar

import psutil
import torch

from covey.errors import ConfigError
from covey.process.memory import free_memory

SUPPORTED = ("cpu", "cuda", "mps", "xpu")


def expect_supported(device: torch.device) -> torch.device:
    """The device, checked. Raises ConfigError for a device type or platform that Covey does not support."""
    if sys.platform not in ("linux", "darwin"):
        raise ConfigError(f"Covey runs on Linux and macOS, and this is {sys.platform}; on Windows use WSL 2.")
    if device.type not in SUPPORTED:
        raise ConfigError(
            f"Covey computes on {', '.join(SUPPORTED)}, and this machine's accelerator is {device.type}: compute on the processor "
            "instead (use_cpu=True in training, --device cpu elsewhere)."
        )
    return device


def choose_device(name: str | None = None) -> torch.device:
    """`name` (such as "cpu" or "cuda:1"), or this machine's accelerator, else the CPU.

    Raises ConfigError for a device that does not exist, is absent or is not supported.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return expect_supported(accelerator or torch.device("cpu"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known; give cpu, cuda, cuda:1, mps or xpu.") from error
    count = torch.accelerator.device_count() if accelerator is not None and accelerator.type == device.type else 0
    if expect_supported(device).type != "cpu" and (device.index or 0) >= count:
        there = (
            "cpu" if accelerator is None else f"cpu and {torch.accelerator.device_count()} of type {accelerator.type}"
        )
        raise ConfigError(f"device {name!r} is not there: this machine has {there}.")
    return device


def in_words(device: torch.device) -> str:
    """`cuda:0 (NVIDIA H100)`, `the processor`."""
    if device.type == "cpu":
        return "the processor"
    if device.type in ("cuda", "xpu"):
        index = getattr(torch, device.type).current_device() if device.index is None else device.index
        return f"{device.type}:{index} ({getattr(torch, device.type).get_device_name(index)})"
    return str(device)


def dtype_to_read_in(device: torch.device) -> torch.dtype:
    """Dtype to load a model for inference: bfloat16 on an accelerator that supports it, else float32."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.bfloat16 if device.type == "xpu" else torch.float32


def onto(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """`x` on `device`. A copy to an accelerator is queued behind its kernels, and the host waits for none of them.

    On CUDA that takes pinned memory: from other memory the driver copies when all kernels before have ended.
    """
    if device.type == "cuda" and x.device.type == "cpu" and type(x) is torch.Tensor:  # not a fake one
        x = x.pin_memory()
    return x.to(device, non_blocking=device.type != "cpu")


def held_by_this_process(device: torch.device) -> int:
    """Bytes of live tensors on an accelerator; 0 for a CPU and for devices that torch does not count."""
    counts = {"cuda": lambda: torch.cuda.memory_allocated(device), "mps": torch.mps.current_allocated_memory}
    counts |= {"xpu": lambda: torch.xpu.memory_allocated(device)}
    return int(counts[device.type]()) if device.type in counts else 0


def free_on(device: torch.device) -> int:
    """Bytes that can still be allocated; on an accelerator, unused memory in torch's caching allocator counts as free."""
    if device.type in ("cuda", "xpu"):
        module = getattr(torch, device.type)
        cached = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0]) + int(cached)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory())
    return int(free_memory() or psutil.virtual_memory().available)


class PeakBytes:
    """Most bytes that tensors have held on a CUDA device since the last `restart`; 0 on other devices. One object for each reader.

    PyTorch has one counter a device, so each reading of it goes to the peaks of all its readers.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _readers: ClassVar[weakref.WeakSet[PeakBytes]] = weakref.WeakSet()

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: by default the current one of each reading. Nothing is read, so that CUDA is not initialized."""
        self._device = device
        self._highest = 0
        with self._lock:
            self._readers.add(self)

    def read(self) -> int:
        """Most bytes since the last `restart`."""
        with self._lock:
            self._count()
            return self._highest

    def restart(self) -> int:
        """Begin again. Returns the most bytes until now."""
        with self._lock:
            self._count()
            highest, self._highest = self._highest, 0
            return highest

    def _count(self) -> None:
        index = self._index()
        if index is None:
            return
        peak = int(torch.cuda.max_memory_allocated(index))
        torch.cuda.reset_peak_memory_stats(index)
        for reader in self._readers:
            if reader._index() == index:
                reader._highest = max(reader._highest, peak)

    def _index(self) -> int | None:
        if not torch.cuda.is_available() or (self._device is not None and self._device.type != "cuda"):
            return None
        index = None if self._device is None else self._device.index
        return torch.cuda.current_device() if index is None else index
