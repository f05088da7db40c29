"""Worker extension of a vLLM server (`--worker-extension-cls covey_worker.CoveyWorker`): a digest of the weights it computes with.

A multiset hash: the bits of every value are mixed to 64 bits and summed modulo 2^64 by block (attention, feed-forward, norm of a
layer). Fusing and packing of matrices, which move values within a block, and padding with zeros leave the sum as it is. Clarke et
al. 2003, "Incremental Multiset Hash Functions and Their Application to Memory Integrity Checking" (additive, without a key:
it finds mistakes, not forgeries). Imports torch alone, because it runs in the server's environment.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MIX = (-7046029254386353131, -4658895280553007687)  # 2^64/phi, and a multiplier of SplitMix64, as signed numbers
_CHUNKS = {"cpu": 2**17, "cuda": 2**24}
"""Values that are mixed at once: on a CPU as its cache holds them, on a GPU many for each launch."""
_EYE_ROWS = 512
_LOADERS = tuple(f"vllm.model_executor.model_loader.reload.{name}" for name in ("layerwise", "inplace"))
_WHOLE_LOADERS = (_LOADERS[0], "vllm.model_executor.models.utils")
"""Loggers that warn at every load: of modules without weights of their own, and of each weight that is rounded to the engine's type."""


def block_of(name: str) -> str:
    """The part of a layer that a weight belongs to: `layers.3.self_attn`; outside layers the module, such as `embed_tokens`."""
    parts = [part for part in name.split(".") if part != "base_layer"]
    match = re.search(r"(?:^|\.)(\w+)\.(\d+)\.(\w+)", ".".join(parts))
    if match:
        return ".".join(match.groups())
    return parts[-2] if len(parts) > 1 else parts[-1]


def digest_of(weight: torch.Tensor) -> int:
    """Sum modulo 2^64 of the mixed bits of each value. Zeros contribute 0, and -0 counts as 0."""
    total = 0
    flat = weight.detach().reshape(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    size = _CHUNKS.get(flat.device.type, 2**24)
    for start in range(0, flat.numel(), size):
        part = flat[start : start + size]
        part = part + 0.0 if part.is_floating_point() and part.element_size() > 1 else part  # -0 becomes 0
        bits = part.contiguous().view(integers).to(torch.int64) * _MIX[0]
        bits = (bits ^ (bits >> 31)) * _MIX[1]
        total += int((bits ^ (bits >> 29)).sum())
    return total % 2**64


def text_of(total: int) -> str:
    return f"{total % 2**64:016x}"


class CoveyWorker:
    """Mixin of vLLM's worker; its methods are called over `/collective_rpc`."""

    model_runner: Any
    reload_weights: Any
    rank: int
    device: torch.device
    link: Any = None
    """This end of the process group with a trainer."""
    link_name: str = ""

    def covey_digest(self) -> dict[str, str]:
        """Digest of the weights that this worker computes with, by block."""
        sums: dict[str, int] = {}
        with torch.no_grad():
            for name, weight in weights_of(self.model_runner.get_model()):
                block = block_of(name)
                sums[block] = (sums.get(block, 0) + digest_of(weight)) % 2**64
        return {block: text_of(total) for block, total in sums.items()}

    def covey_reload(self, files: list[str]) -> None:
        """Load the weights of these safetensors files. They hold all matrices that are fused with each other, or none of them."""
        with _quiet(*_LOADERS):
            reload(self, weights_iterator=_read(files))

    def covey_reload_folder(self, folder: str) -> None:
        """Load the weights of all safetensors files of a folder."""
        reload(self, weights_path=folder)

    def covey_join(self, backend: str, host: str, port: int, number: int, size: int, limit: float, name: str) -> None:
        """Join a trainer's process group of this name, in place of an earlier one."""
        from covey_link import Link, meeting, store_at

        self.link = None
        device = "cpu" if backend == "gloo" else str(self.device)
        store = meeting(store_at(host, port, size=size, seconds=limit), number)
        self.link = Link(backend, store, rank=1 + self.rank, size=size, seconds=limit, device=device)
        self.link_name = name

    def linked(self, name: str) -> Any:
        """The group of this name. Raises RuntimeError, rather than wait for a trainer whose group another has replaced."""
        if self.link is None or self.link_name != name:
            raise RuntimeError("another process has joined this server since")
        return self.link

    def covey_sees(self, path: str) -> bool:
        """True if this file can be read here."""
        return os.access(path, os.R_OK)

    def covey_try(self, name: str) -> list[list[float]]:
        """The values of the tensors `trial` that the trainer sends over the group."""
        link = self.linked(name)
        with link.failing():
            return [tensor.tolist() for key, tensor in link.receive() if key == "trial"]

    def covey_receive(self, name: str) -> None:
        """Load the weights that the trainer sends over the group, as `covey_reload` does."""
        link = self.linked(name)
        with link.failing(), _quiet(*_LOADERS):
            reload(self, weights_iterator=link.receive())


def _read(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Without the warnings of these loggers, some of which expect every weight of the model."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def reload(worker: Any, **weights: Any) -> None:
    """vLLM's `reload_weights` in the format of a checkpoint, with what its CPU kernels pack packed again.

    vLLM 0.32's CPU build packs experts only where it makes their kernel: without one it makes it anew. It packs `lm_head` at the
    start. With tied embeddings a reload brings no weight of that name, and logits would be computed with the old matrix.
    """
    modules = list(worker.model_runner.get_model().modules())
    methods: list[Any] = [getattr(module, "quant_method", None) for module in modules]
    kernels = {method: method.moe_kernel for method in methods if hasattr(method, "unquantized_backend")}
    kernels = kernels if worker.device.type == "cpu" else {}
    for method in kernels:
        method.moe_kernel = None
    try:
        with _quiet(*_WHOLE_LOADERS):
            worker.reload_weights(**weights, is_checkpoint_format=True)
    finally:
        for method, kernel in kernels.items():  # of experts that were not loaded
            method.moe_kernel = method.moe_kernel or kernel
    for module in modules:
        if has_packed_copy(module):
            module.quant_method.process_weights_after_loading(module)


def has_packed_copy(module: torch.nn.Module) -> bool:
    """True if a CPU kernel holds a packed copy of a weight that the module still has."""
    weight = getattr(module, "weight", None)
    return (
        hasattr(module, "cpu_linear") and hasattr(module, "quant_method") and weight is not None and weight.dim() == 2
    )


def weights_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by name, with the values that the kernels read.

    A matrix packed by a CPU kernel is recovered by multiplying with the identity, which is exact. A packed copy that
    differs from its weight adds an entry of its own, so that the digest cannot match.
    """
    modules = dict(model.named_modules())
    names = {id(weight): name for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        if weight.numel() or not hasattr(owner, "cpu_linear"):
            yield name, weight
        else:
            columns = int(getattr(owner, "input_size_per_partition", 0) or owner.input_size)
            yield from ((name, part) for part in _read_back(owner, weight, columns))
    for owner in modules.values():
        if has_packed_copy(owner) and owner.weight.numel():
            packed = sum(digest_of(part) for part in _read_back(owner, owner.weight, owner.weight.shape[1])) % 2**64
            if packed != digest_of(owner.weight):
                yield names[id(owner.weight)], torch.ones(1)


def _read_back(owner: Any, weight: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
    eye = torch.eye(columns, dtype=weight.dtype)
    for start in range(0, columns, _EYE_ROWS):
        yield owner.cpu_linear(eye[start : start + _EYE_ROWS], weight, None)
