"""LoRA adapters of one base, merged: exactly, by rank concatenation, or to a smaller rank with the error said."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.adapters import adapter_options, base_of, changes_base, odd_options, place_of, scaling
from covey.errors import ConfigError, ModelError
from covey.files.bounded import read_json
from covey.models.merging.methods import is_zero

_SAME = ("base_model_name_or_path", "revision", "target_modules", "target_parameters", "peft_type", "fan_in_fan_out")


def merge_adapters(folders: Sequence[Path], out: Path, weights: Sequence[float] = (), rank: int | None = None) -> float:
    """Write the weighted mean of LoRA adapters to the new folder `out`; the largest relative error of a layer's update.

    The update of a layer is `sum_k w_k s_k B_k A_k`, with `s` the adapter's scaling. Without `rank`, the `B` are put side by
    side and the `A` below each other: rank `sum r_k`, exact. With `rank`, its best approximation (SVD; Eckart and Young
    1936). `weights` (empty: equal) are normalized to sum 1. Raises ConfigError for adapters that do not fit together.
    """
    if len(folders) < 2:
        raise ConfigError("one adapter was given; merging takes several.")
    shares = list(weights) or [1.0] * len(folders)
    if len(shares) != len(folders) or not abs(sum(shares)) < float("inf") or is_zero(sum(shares), shares):
        raise ConfigError(
            f"{len(shares)} weights were given for {len(folders)} adapters; give one for each, all finite and not adding up to 0."
        )
    shares = [weight / sum(shares) for weight in shares]
    configs = [_config(folder) for folder in folders]
    in_order = lambda value: sorted(value) if isinstance(value, list) else value
    for folder, config in zip(folders[1:], configs[1:], strict=True):
        for name in _SAME:
            if in_order(configs[0].get(name)) != in_order(config.get(name)):
                raise ConfigError(
                    f"{folders[0]} and {folder} differ in {name} ({configs[0].get(name)!r} and {config.get(name)!r}); merge "
                    "adapters of one base and one set of layers."
                )
    loaded = [_tensors(folder) for folder in folders]
    _check_tensors(folders, loaded)
    layers = sorted(name.removesuffix(".lora_A.weight") for name in loaded[0] if name.endswith(".lora_A.weight"))
    merged: dict[str, Tensor] = {}
    ranks, worst = set(), 0.0
    for layer in layers:
        down, up = [], []
        for folder, tensors, share, config in zip(folders, loaded, shares, configs, strict=True):
            a, b = _factors(folder, tensors, layer, int(config["r"]))
            down.append(a)
            up.append(b * share * scaling(config))
        a, b = torch.cat(down, 1), torch.cat(up, 1)  # [E, r, in], [out, r, E]
        if rank is not None:
            downs, ups, errors = zip(*(_to_rank(a[e], b[..., e], rank) for e in range(len(a))), strict=True)
            a, b, worst = torch.stack(downs), torch.stack(ups, -1), max(worst, *errors)
        ranks.add(a.shape[1])
        merged[f"{layer}.lora_A.weight"], merged[f"{layer}.lora_B.weight"] = (
            x.contiguous() for x in (a.flatten(0, 1), b.flatten(1, 2))
        )
    if len(ranks) != 1:
        raise ConfigError(f"the layers would have ranks {sorted(ranks)}; give --rank, one for all.")
    _write(out, folders[0], configs[0], merged, ranks.pop())
    return worst


def _check_tensors(folders: Sequence[Path], loaded: Sequence[dict[str, Tensor]]) -> None:
    """Raise ConfigError for tensors that are no factors of a linear layer, or that one adapter has alone."""
    for folder, tensors in zip(folders, loaded, strict=True):
        for name in sorted(set(tensors) ^ set(loaded[0])):
            raise ConfigError(f"{folders[0]} and {folder} do not adapt the same layers: {name} is in one of them only.")
        for name in tensors:
            if not bool(tensors[name].isfinite().all()):
                raise ModelError(f"{folder} holds numbers in {name} that are not finite; take an earlier checkpoint.")
            if not name.endswith((".lora_A.weight", ".lora_B.weight")):
                raise ConfigError(
                    f"{folder} holds {name}, which merging adapters does not know; merge it into its base first (covey merge {folder} -o ...)."
                )


def _factors(folder: Path, tensors: dict[str, Tensor], layer: str, rank: int) -> tuple[Tensor, Tensor]:
    """A layer's A [E, r, in] and B [out, r, E], of E experts in one parameter or of a linear layer, where E is 1."""
    a = _by_rank(tensors[f"{layer}.lora_A.weight"].float(), rank, is_up=False)
    b = _by_rank(tensors[f"{layer}.lora_B.weight"].float(), rank, is_up=True)
    if a is None or b is None:
        raise ConfigError(f"{folder} does not hold rank {rank} in {layer}, as its adapter_config.json says.")
    return a, b


def _by_rank(factor: Tensor, rank: int, *, is_up: bool) -> Tensor | None:
    """A view of a LoRA factor with its rank in dimension 1: A as [E, r, in], B (`is_up`) as [out, r, E]; None if it has no such rank.

    E experts of one parameter stand in one factor of PEFT: A holds the ranks of an expert together, B the experts of a rank.
    A linear layer is the case E = 1.
    """
    dim = 1 if is_up else 0
    if factor.ndim < 2 or factor.shape[dim] % rank:
        return None
    view: Tensor = factor.unflatten(dim, (rank, -1) if is_up else (-1, rank))
    return view


def _to_rank(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """`b a` [out, in] at rank `rank`, without forming it: SVD of the small core between two QR factors."""
    if rank < 1:
        raise ConfigError(f"rank {rank} leaves nothing; give at least 1.")
    qb, rb = torch.linalg.qr(b)
    qa, ra = torch.linalg.qr(a.T)
    u, s, vt = torch.linalg.svd(rb @ ra.T)
    used_rank = min(rank, len(s))
    total = float(s.square().sum().sqrt())
    error = float(s[used_rank:].square().sum().sqrt()) / total if total else 0.0
    root = s[:used_rank].sqrt()
    low_b, low_a = qb @ u[:, :used_rank] * root, root[:, None] * vt[:used_rank] @ qa.T
    pad = rank - used_rank
    return torch.nn.functional.pad(low_a, (0, 0, 0, pad)), torch.nn.functional.pad(low_b, (0, pad)), error


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "adapter_config.json", ModelError)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{folder} is no LoRA adapter; merging adapters takes LoRA alone.")
    for name in odd_options(config):
        raise ConfigError(f"{folder} uses {name}, which merging adapters does not know; merge it into its base first.")
    if changes_base(config):
        raise ConfigError(
            f"{folder} began with init_lora_weights={config['init_lora_weights']!r}, which changes the base, so its factors do not add up "
            "with others; merge each adapter into its base first, then merge the models."
        )
    if base := config.get("base_model_name_or_path"):
        config["base_model_name_or_path"] = place_of(str(base))
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelError(f"{folder} has no adapter_model.safetensors; save the adapter with PEFT's save_pretrained.")
    return load_file(str(file))


def _write(out: Path, source: Path, config: dict[str, Any], tensors: dict[str, Tensor], rank: int) -> None:
    out.mkdir(parents=True)
    try:
        save_file(tensors, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
        described = {**config, "r": rank, "lora_alpha": rank, "use_rslora": False}
        (out / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
        for file in source.glob("tokenizer*"):
            shutil.copyfile(file, out / file.name)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def weights_on_same_base(model: Any, folder: str | Path) -> dict[str, Any] | None:
    """Values for the trained parameters of a model with a LoRA adapter that make it the model of the adapter in `folder`.

    None where that is no LoRA of the same base, or has layers, a form or a rank that the model's adapter cannot hold.
    """
    described = adapter_options(folder)
    config = getattr(model, "peft_config", {}).get("default")
    if described is None or config is None or not _is_plain_lora(described) or not _is_plain_lora(config.to_dict()):
        return None
    is_same = place_of(base_of(folder, described)) == place_of(str(config.base_model_name_or_path))
    rank, room = int(described["r"]), int(config.r)
    if not is_same or rank > room or described.get("revision") != config.revision:
        return None
    from peft.utils import load_peft_weights

    saved = load_peft_weights(str(folder), device="cpu")
    factor = scaling(described) / scaling(config.to_dict())
    fitted = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        value = saved.pop(name.replace(".default", ""), None)
        whole = parameter.detach().new_zeros(parameter.shape)  # no such layer there: a B of zeros changes nothing
        if value is not None:
            is_up = ".lora_B." in name
            part, places = _by_rank(value, rank, is_up=is_up), _by_rank(whole, room, is_up=is_up)
            if part is None or places is None or part[:, :1].shape != places[:, :1].shape:
                return None
            places[:, :rank] = part * (factor if is_up else 1.0)
        fitted[name] = whole
    return None if saved else fitted


def _is_plain_lora(config: Mapping[str, Any]) -> bool:
    return config.get("peft_type") == "LORA" and not changes_base(config) and not odd_options(config)
