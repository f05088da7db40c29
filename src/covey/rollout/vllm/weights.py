"""Weights of a policy in the format of a server: all under their transformers names, or the adapter alone; and their digests."""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from covey.adapters import changes_base, has_adapter
from covey.errors import ConfigError
from covey.models import decoder_of, reads_media, unwrapped
from covey.process.sharding import Shards, is_sharded, whole_state
from covey.rollout.vllm.attestation import trainer_logprobs
from covey.rollout.vllm.pieces import Piece, add_digest, count_of, in_pieces
from covey.rollout.vllm.plain_layers import (
    changed_layers,
    layer_with,
    plain_config,
    plain_name,
    plain_state,
    saved_tensors,
)
from covey.rollout.vllm.worker.covey_worker import text_of
from covey.types import Prompt


@dataclass(frozen=True, eq=False)
class Source:
    """The weights of a policy, for a server. Of a model split over processes all take part in every method, and one writes."""

    policy: Any
    shards: Shards | None = None
    writes: bool = True
    """False: this process only takes part in gathering."""
    summon: Callable[[], Any] | None = None
    """Of weights that stay until they are sent: called on the process that sends before it gathers, as those of a split model wait for it.
    None: the weights are gathered when the update is prepared."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Size of the weights in `dtype`, about: adapters and tied weights count too."""
        return sum(map(count_of, self.policy.parameters())) * dtype.itemsize

    def plain(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under the names of a checkpoint, adapters merged into a copy; of a split model a block at a time."""
        if self.shards is None:
            return plain_weights(self.policy)
        return as_saved(unwrapped(self.policy), _gathered_weights(self.policy, self.shards))

    def distinct(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """`plain` as in a checkpoint: tied tensors once, floating-point ones in `dtype`."""
        if self.shards is None:
            return distinct_weights(self.policy, dtype)
        base = unwrapped(self.policy)
        return as_saved(base, _once(base, _gathered_weights(self.policy, self.shards), dtype))

    def logprobs(self, prompt: Prompt, dtype: torch.dtype | None = None) -> Tensor:
        """`trainer_logprobs` of this policy."""
        work = lambda: trainer_logprobs(self.policy, prompt, dtype)
        with torch.no_grad():
            return work() if self.shards is None else self.shards.run(work)

    @property
    def is_float32(self) -> bool:
        weights = [weight for weight in unwrapped(self.policy).parameters() if weight.is_floating_point()]
        return all(weight.dtype == torch.float32 for weight in weights)


def plain_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of a checkpoint, adapters merged into a copy; the policy is not changed."""
    return as_saved(unwrapped(policy), _merged(policy, unwrapped(policy).state_dict(keep_vars=True)))


def as_saved(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights as `save_pretrained` writes them, a layer at a time: transformers fuses experts, servers read them one by one."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        yield from weights
        return
    for _, layer in groupby(weights, lambda pair: re.findall(r"^.*?\.\d+\.", pair[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _merged(policy: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the base model's `state` without those of adapters, which are merged into copies; quantized ones in floating point."""
    layers, done = changed_layers(unwrapped(policy)), set[str]()
    for name, weight in state.items():
        if (place := layer_with(name, layers)) is None:
            yield name, weight.detach()
        elif place not in done:
            done.add(place)
            yield from ((f"{place}.{part}", value) for part, value in plain_state(place, layers[place]).items())


@torch.no_grad()
def _gathered_weights(policy: nn.Module, shards: Shards) -> Iterator[tuple[str, Tensor]]:
    """`plain_weights` of a model split over processes, a block at a time: no process holds more than one."""
    for ready in _blocks(unwrapped(policy), shards):
        for name, weight in _merged(policy, ready):
            yield name, weight.clone()  # a reader may hold it after the block is freed


def _blocks(base: nn.Module, shards: Shards) -> Iterator[dict[str, Tensor]]:
    """Weights of each block of a split model, while they are whole."""
    layers, done = changed_layers(base), set[str]()
    for _ in shards.each_block():
        state = saved_tensors(base)
        split = {layer_with(name, layers) or name for name, value in state.items() if is_sharded(value)}
        # a layer whose buffers are whole, as those of VeRA, waits for its weights
        ready = {n: value for n, value in state.items() if n not in done and (layer_with(n, layers) or n) not in split}
        done |= ready.keys()
        yield ready


def _first_names(module: nn.Module) -> dict[str, str]:
    """By name of a parameter: the first name of the same one, which differs for tied parameters."""
    names: dict[int, str] = {}
    return {
        plain_name(name): names.setdefault(id(parameter), plain_name(name))
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def distinct_weights(policy: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """`plain_weights` as in a checkpoint: tied tensors once, floating-point ones in `dtype`."""
    base = unwrapped(policy)
    return as_saved(base, _once(base, _merged(policy, base.state_dict(keep_vars=True)), dtype))


def _once(model: nn.Module, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Weights in `dtype`, those of a tied parameter under its first name alone."""
    first = _first_names(model)  # not by address: that of a merged copy may be used again
    return (
        (name, weight.to(dtype) if weight.is_floating_point() else weight)
        for name, weight in weights
        if first.get(name, name) == name
    )


def write_weights(
    source: Source,
    folder: Path,
    dtype: torch.dtype,
    *,
    has_digests: bool = False,
    before: Mapping[str, Piece] = MappingProxyType({}),
) -> dict[str, Piece]:
    """Write config and safetensors to a temporary folder, then rename it to `folder`, which must be new. Returns the pieces.

    Those that equal their piece of `before` bit for bit are linked to its file instead of written.
    """
    weights = source.distinct(dtype)
    try:
        return _write_whole(source.policy, weights, folder, before, has_digests) if source.writes else {}
    finally:
        if source.shards is not None:  # the other processes gather to the end, whatever became of the files
            deque(weights, maxlen=0)


def _write_whole(
    policy: Any, weights: Iterable[tuple[str, Tensor]], folder: Path, before: Mapping[str, Piece], has_digests: bool
) -> dict[str, Piece]:
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    pieces: dict[str, Piece] = {}
    with _naming(folder):
        plain_config(policy).save_pretrained(aside)
        for key, tensors in in_pieces(weights):
            name = f"model-{len(pieces):05d}.safetensors"
            pieces[key] = _written(tensors, aside / name, folder / name, before.get(key), has_digests)
    _publish(aside, folder)
    return pieces


def _written(tensors: Mapping[str, Tensor], aside: Path, file: Path, before: Piece | None, has_digests: bool) -> Piece:
    from safetensors.torch import save_file

    if before is not None and before.file is not None and before.holds(tensors):
        try:
            os.link(before.file, aside)
        except OSError:  # a file system without links: the same bits once more
            save_file(dict(tensors), aside, {"format": "pt"})
        return replace(before, file=file)
    save_file(dict(tensors), aside, {"format": "pt"})
    return Piece.of(tensors, file, has_digests)


def copy_weights(
    source: Source, dtype: torch.dtype, *, has_digests: bool, before: Mapping[str, Piece]
) -> dict[str, Piece]:
    """The weights copied to host memory; pieces that equal theirs of `before` bit for bit are those. {} where `source` does not write."""
    pieces: dict[str, Piece] = {}
    for key, tensors in in_pieces(source.distinct(dtype)):
        if source.writes:
            old = before.get(key)
            pieces[key] = old if old is not None and old.holds(tensors) else Piece.of(tensors, None, has_digests)
    return pieces


def write_adapter(source: Source, folder: Path) -> int:
    """Write the active adapter in PEFT's format to a temporary folder, then rename it to `folder` (must be new). Returns the bytes."""
    policy = source.policy
    split = {} if source.shards is None else {"state_dict": whole_state(policy, trained_only=True, keeps=source.writes)}
    if not source.writes:
        return 0
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with _naming(folder):
        policy.save_pretrained(str(aside), selected_adapters=[policy.active_adapter], **split)
    if policy.active_adapter != "default":  # PEFT writes other names to a subfolder
        inner = aside / policy.active_adapter
        for file in inner.iterdir():
            file.rename(aside / file.name)
        inner.rmdir()
    total = sum(file.stat().st_size for file in aside.iterdir())
    _publish(aside, folder)
    return total


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Context whose errors of a disk name this folder, where they name no file: it may be on another disk than the run."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as caught:
        error: Any = caught
        if getattr(error, "errno", True):  # an OSError without a number comes from no disk
            error.filename = getattr(error, "filename", None) or str(folder)
        raise


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
    odd = next((name for name, weight in policy.named_parameters() if policy.active_adapter in name.split(".")
                and not (re.search(r"\.lora_[AB]\.[^.]+\.weight$", name) and weight.dim() == 2)), None)  # fmt: skip
    name, root = policy.active_adapter, 0.5 if config.use_rslora else 1
    scaled = [module for module in policy.modules() if name in getattr(module, "lora_alpha", ())]
    is_odd = any(abs(part.scaling[name] * part.r[name] ** root / part.lora_alpha[name] - 1) > 1e-9 for part in scaled)
    reasons = {
        "several adapters are active": len(policy.active_adapters) > 1,
        "the adapter is scaled otherwise than its configuration has it": is_odd,
        f"it takes no adapters (covey serve-vllm MODEL --lora-rank {max(ranks)} starts one that does)": max_rank == 0,
        f"its --max-lora-rank is {max_rank} and the adapter's rank {max(ranks)}": max(ranks) > max_rank,
        "the adapter began by changing the base's weights (init_lora_weights)": changes_base(config.to_dict()),
        "the adapter uses DoRA": bool(getattr(config, "use_dora", False)),
        "the adapter trains biases": config.bias != "none",
        f"the adapter has {odd}, which is no LoRA of a linear layer": odd is not None,
        "the adapter acts from its alora_invocation_tokens on": bool(getattr(config, "alora_invocation_tokens", None)),
        "the adapter changes what reads images or sounds": reads_media(policy) and not targets <= _of_decoder(policy),
        "the adapter changes experts (target_parameters)": bool(getattr(config, "target_parameters", None)),
        "the adapter has targets among embeddings or lm_head": bool(
            ends & {"lm_head", "embed_tokens", "wte", "embed_out"}
        ),
        f"it has {data_parallel} replicas, of which an adapter may reach one only": data_parallel > 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


@torch.no_grad()
def base_sums(policy: nn.Module, shards: Shards | None, dtype: torch.dtype) -> dict[str, int]:
    """Sums of the digest of the weights that a LoRA adapter stands on, by block. Of a split model all processes take part."""
    base, sums = unwrapped(policy), dict[str, int]()
    blocks = [base.state_dict(keep_vars=True)] if shards is None else _blocks(base, shards)
    held = Tensor.detach if shards is None else Tensor.clone  # a layer is read after its block is freed
    plain = ((plain_name(name), held(weight)) for block in blocks for name, weight in block.items()
             if re.search(r"\.lora_\w+\.", name) is None)  # fmt: skip
    for name, weight in as_saved(base, _once(base, plain, dtype)):
        add_digest(sums, name, weight)
    return sums


def _of_decoder(policy: nn.Module) -> set[str]:
    """Names of the modules of the language model, in which alone servers apply adapters."""
    inner = set(map(id, decoder_of(policy).modules()))
    return {name for name, module in policy.named_modules() if id(module) in inner or name.endswith("lm_head")}


def digests_of(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Digest of each block's values as bits, independent of how a server fuses or packs them; comparable with a worker's."""
    sums: dict[str, int] = {}
    for name, weight in weights:
        add_digest(sums, name, weight)
    return texts_of(sums)


def sums_of(pieces: Iterable[Piece]) -> dict[str, int]:
    """Sums of the digest of all pieces, by block."""
    sums: dict[str, int] = {}
    for piece in pieces:
        for block, part in piece.sums.items():
            sums[block] = (sums.get(block, 0) + part) % 2**64
    return sums


def texts_of(sums: Mapping[str, int]) -> dict[str, str]:
    """Digests of blocks as a worker writes them."""
    return {block: text_of(total) for block, total in sums.items()}


def differing_blocks(expected: Mapping[str, str], digests: Mapping[str, str]) -> list[str]:
    """Blocks with different digests. Raises ValueError if the sets of blocks differ."""
    if expected.keys() != digests.keys():
        raise ValueError(sorted(expected.keys() ^ digests.keys())[:3])
    return sorted(block for block, digest in expected.items() if digests[block] != digest)


def safe_name(text: str) -> str:
    """Text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"
