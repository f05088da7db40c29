"""Weights of a policy in the format of a server: all under their transformers names, or the adapter alone; and their digests."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.adapters import has_adapter
from covey.errors import ConfigError
from covey.models import unwrapped
from covey.rollout.vllm.worker.covey_worker import block_of, digest_of, text_of

_SHARD_BYTES = 4 * 2**30


def plain_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights under their transformers names, adapters merged into a copy; the policy is not changed."""
    layers = {name: module for name, module in policy.named_modules() if hasattr(module, "get_delta_weight")}
    base = unwrapped(policy)
    is_adapted = base is not policy and hasattr(policy, "peft_config")
    places = {id(parameter): name for name, parameter in policy.named_parameters()}
    for name, weight in base.state_dict(keep_vars=True).items():
        if is_adapted and (".lora_" in name or ".modules_to_save." in name):
            continue
        found = weight.detach()
        owner = places.get(id(weight), "").removesuffix(".base_layer.weight")
        if owner in layers and name.endswith(".base_layer.weight"):
            layer = layers[owner]
            for adapter in layer.active_adapters:
                found = found + layer.get_delta_weight(adapter).to(found.dtype)
        yield name.replace(".base_layer.", "."), found


def distinct_weights(policy: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """`plain_weights` as in a checkpoint: tied tensors once, floating-point ones in `dtype`."""
    seen: set[int] = set()
    for name, weight in plain_weights(policy):
        if weight.numel() and weight.data_ptr() in seen:
            continue
        seen.add(weight.data_ptr())
        yield name, weight.to(dtype) if weight.is_floating_point() else weight


def write_weights(policy: Any, folder: Path, dtype: torch.dtype) -> int:
    """Write config and safetensors to a temporary folder, then rename it to `folder`, which must be new. Returns the bytes."""
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    unwrapped(policy).config.save_pretrained(aside)
    total = _write_shards(distinct_weights(policy, dtype), aside)
    _publish(aside, folder)
    return total


def _write_shards(weights: Iterable[tuple[str, Tensor]], folder: Path) -> int:
    """Write shards of some gigabytes; the host holds one at a time. Returns the bytes."""
    from safetensors.torch import save_file

    shard: dict[str, Tensor] = {}
    size, number, total = 0, 0, 0
    for name, weight in weights:
        held = weight.cpu().contiguous()
        if size and size + held.nbytes > _SHARD_BYTES:
            save_file(shard, folder / f"model-{number:05d}.safetensors", {"format": "pt"})
            shard, size, number = {}, 0, number + 1
        shard[name] = held
        size, total = size + held.nbytes, total + held.nbytes
    save_file(shard, folder / f"model-{number:05d}.safetensors", {"format": "pt"})
    return total


def write_adapter(policy: Any, folder: Path) -> int:
    """Write the active adapter in PEFT's format to a temporary folder, then rename it to `folder` (must be new). Returns the bytes."""
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    policy.save_pretrained(str(aside), selected_adapters=[policy.active_adapter])
    if policy.active_adapter != "default":  # PEFT writes other names to a subfolder
        inner = aside / policy.active_adapter
        for file in inner.iterdir():
            file.rename(aside / file.name)
        inner.rmdir()
    total = sum(file.stat().st_size for file in aside.iterdir())
    _publish(aside, folder)
    return total


def _publish(aside: Path, folder: Path) -> None:
    """Sync every file to disk, then rename the folder: a reader sees all of it or nothing."""
    for file in aside.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if folder.exists():
        raise ConfigError(f"{folder} is there already; every version of the weights needs a folder of its own.")
    aside.rename(folder)


def why_not_alone(policy: Any, max_rank: int, data_parallel: int) -> str | None:
    """Reason why a server cannot load this policy's adapter alone; None if it can."""
    if not has_adapter(policy):
        return "there is no adapter"
    config = policy.peft_config[policy.active_adapter]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"the adapter is of kind {kind}"
    ranks = [int(config.r), *map(int, (getattr(config, "rank_pattern", None) or {}).values())]
    targets = {name for name, module in policy.named_modules() if hasattr(module, "lora_A") and len(module.lora_A)}
    ends = {name.rsplit(".", 1)[-1] for name in targets}
    reasons = {
        "it was started without --enable-lora (and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)": max_rank == 0,
        f"its --max-lora-rank is {max_rank} and the adapter's rank {max(ranks)}": max(ranks) > max_rank,
        "the adapter uses DoRA": bool(getattr(config, "use_dora", False)),
        "the adapter trains modules_to_save": bool(config.modules_to_save),
        "the adapter trains biases": config.bias != "none",
        "the adapter has targets among embeddings or lm_head": bool(
            ends & {"lm_head", "embed_tokens", "wte", "embed_out"}
        ),
        f"it has {data_parallel} replicas, of which an adapter may reach one only": data_parallel > 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def digests_of(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Digest of each block's values as bits, independent of how a server fuses or packs them; comparable with a worker's."""
    sums: dict[str, int] = {}
    for name, weight in weights:
        block = block_of(name)
        sums[block] = (sums.get(block, 0) + digest_of(weight)) % 2**64
    return {block: text_of(total) for block, total in sums.items()}


def differing_blocks(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Blocks with different digests. Raises ValueError if the sets of blocks differ."""
    if expected.keys() != found.keys():
        raise ValueError(sorted(expected.keys() ^ found.keys())[:3])
    return sorted(block for block, one in expected.items() if found[block] != one)


def safe_name(text: str) -> str:
    """Text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"
