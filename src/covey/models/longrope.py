"""Two sets of rotary factors (`longrope`; Ding et al. 2024, "LongRoPE"): the one that a model rotates every row by."""

import logging
import math
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from covey.errors import ModelError
from covey.files.bounded import read_json
from covey.models.passes import unwrapped

logger = logging.getLogger(__name__)

Factors = Literal["short", "long"]


def short_rope_limit(config: Any) -> int | None:
    """Tokens past which `longrope` rotates a whole batch by `long_factor`, keys in a cache excepted; None where nothing changes.

    It is vLLM's default context length of such a model, too.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [part for part in (rope, *rope.values()) if isinstance(part, dict) and part.get("rope_type") == "longrope"]
    values = lambda part, length: [part.get(f"{length}_{name}") for name in ("factor", "mscale")]
    ends = [
        part.get("original_max_position_embeddings") for part in kinds if values(part, "short") != values(part, "long")
    ]
    return min((int(end) for end in ends if end is not None), default=None)


def rope_factors(model: nn.Module) -> Factors | None:
    """The set that rotates every row of a model: "short" as it is loaded. None for a model that has not two sets."""
    inner = unwrapped(model)
    if short_rope_limit(inner.config.get_text_config()) is None:
        return None
    return "long" if getattr(inner, "rope_factors", "short") == "long" else "short"


def context_limit(model: Any) -> int | None:
    """The most tokens, prompt and completion together, that the model has positions for; None when it has no limit.

    A model that rotates by the short one of two sets has the positions of that set.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    limits = (limit, None if rope_factors(model) == "long" else short_rope_limit(config))
    return min((int(x) for x in limits if x is not None and math.isfinite(x) and x > 0), default=None)


def can_take_long(model: nn.Module) -> bool:
    """True where transformers rotates by buffers, which `take_factors` sets; Phi-3.5-MoE and code from the hub do otherwise."""
    return bool(_buffers(model))


def take_factors(model: nn.Module, factors: Factors) -> None:
    """Rotate every row by one set, whatever its length: its frequencies stand in the place of the short ones, in memory alone.

    The configuration, and so what is saved, stays as it came. Nothing changes unless `can_take_long`. `attention_factor` is the same for both sets in transformers.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    places = _buffers(model)
    for module, prefix, layer_type in places:
        limit = short_rope_limit(module.config)
        seq_len = limit + 1 if factors == "long" and limit is not None else None
        original: Tensor = getattr(module, f"{prefix}original_inv_freq")
        rotate = ROPE_INIT_FUNCTIONS["longrope"]
        frequencies, _ = rotate(module.config, original.device, seq_len=seq_len, layer_type=layer_type)
        for name in ("original_inv_freq", "inv_freq"):
            getattr(module, f"{prefix}{name}").copy_(frequencies)
    if places:
        unwrapped(model).rope_factors = factors


def follow_run(model: nn.Module, folder: str | Path) -> None:
    """Take the set by which the run of this checkpoint trained, from the `run.json` in its folder or the one above; else "short"."""
    if rope_factors(model) is None:
        return
    for place in (Path(folder), Path(folder).parent):
        if (place / "run.json").is_file():
            described = read_json(place / "run.json", ModelError)
            facts = described.get("model") if isinstance(described, dict) else None
            if isinstance(facts, dict) and facts.get("rope_factors") == "long" and can_take_long(model):
                take_factors(model, "long")
                logger.warning("%s rotates every row by long_factor, as the run in %s did.", folder, place)
            return


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, str | None]]:
    """Rotary modules, with the prefix of their buffers' names and the type of the layers where there are several."""
    places: list[tuple[nn.Module, str, str | None]] = []
    for module in unwrapped(model).modules():
        kinds = getattr(module, "rope_type", None)
        many = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type in [name for name, kind in many.items() if kind == "longrope"]:
            prefix = "" if layer_type is None else f"{layer_type}_"
            has_buffers = isinstance(getattr(module, f"{prefix}original_inv_freq", None), Tensor)
            rope = module.config.rope_parameters
            if has_buffers and "long_mscale" not in (rope if layer_type is None else rope[layer_type]):
                places.append((module, prefix, layer_type))
    return places
