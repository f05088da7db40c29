"""GPUs by name: memory, FLOPS and bandwidth by their data sheets, and the shares that runs reach."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from covey.errors import ConfigError, did_you_mean

PRODUCTS = 0.36
"""Share of the peak that products get: Llama 3.1 8B on 8 H100 with FSDP trains at 33% (eager) to 39% (compiled) of it (torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md, Dec 2024)."""
READS = 0.886
"""Share of the bandwidth that reading gets: a copy moves 2.97 TB/s of an H100's 3.35 (torch 2.11, 2026-11-26). With the time of
its kernels, Llama 2 7B on an A100 comes to 9.0 ms a token; gpt-fast's README has 9.6."""
LINKS = 0.8
"""Share of a link that collectives get; assumed."""
HOST_LINK = 25e9
"""Bytes a second between a GPU and its host, each way: 80% of PCIe 4 x16; assumed."""
HOST_READS = 200e9
"""Bytes a second that the processors of a node read and write in an optimizer step: half of 8 channels of DDR5-4800 and more; assumed."""
FOLDER = 2e9
"""Bytes a second of weights that are written to a folder and read again by a vLLM server: an NVMe disk; assumed."""
NETWORK = 50e9
"""Bytes a second of a GPU between nodes: InfiniBand or RoCE at 400 Gb/s a GPU."""
A_NODE = 8
"""GPUs of a node."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet: decimal GB, dense TFLOPS, GB/s; `link` is one direction of NVLink, or PCIe."""

    name: str
    memory_gb: float
    bfloat16: float
    float32: float
    bandwidth: float
    link: float
    source: str

    @property
    def memory(self) -> int:
        """Bytes that a process can use: CUDA's context and the allocator's holes leave 94%."""
        return int(0.94 * self.memory_gb * 1e9)

    def flops(self, itemsize: int) -> float:
        """Operations a second that products of numbers of so many bytes get."""
        return PRODUCTS * 1e12 * (self.bfloat16 if itemsize <= 2 else self.float32)

    @property
    def reads(self) -> float:
        """Bytes a second from its memory."""
        return READS * 1e9 * self.bandwidth

    def sends(self, count: int) -> float:
        """Bytes a second to `count` GPUs of a group, by the slowest link on the way."""
        return LINKS * (self.link * 1e9 if count <= A_NODE else min(self.link * 1e9, NETWORK))


GPUS = {row["name"]: Gpu(**row) for row in json.loads(Path(__file__).with_name("gpus.json").read_text())}


def gpus(text: str) -> tuple[int, Gpu]:
    """The number and kind of GPUs of "8xH100", or of nodes, "2x8xH100"; a name alone is one. Raises ConfigError with the known names."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?(?:(\d+)\s*[xX*]\s*)?([A-Za-z].*?)\s*", text)
    by_plain = {_plain(name): gpu for name, gpu in GPUS.items()}
    gpu = by_plain.get(_plain(match[3])) if match else None
    count = int(match[1] or 1) * int(match[2] or 1) if match else 0
    if gpu is not None and count < 1:
        raise ConfigError(f"--gpus {text!r} asks for no GPU at all; give a number of 1 or more, such as 8x{gpu.name}.")
    if match is None or gpu is None:
        near = did_you_mean(match[3], GPUS) if match else ""
        raise ConfigError(
            f"--gpus {text!r} names no GPU that is known here.{near} Write a number and a name, such as 8xH100; known: "
            f"{', '.join(GPUS)}."
        )
    return count, gpu


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("sxm").replace("80gb", "").removeprefix("nvidia")
