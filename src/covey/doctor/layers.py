"""Models with few of their layers: memory and time of a step are linear in the number of layers, so two counts give any."""

import copy
from dataclasses import fields, replace
from typing import Any, TypeVar

T = TypeVar("T")

_MANY = 12
"""Layers from which a model is continued from few."""
_UNEVEN = (
    "first_k_dense_replace", "mlp_only_layers", "num_kv_shared_layers", "attn_layer_indices",
    "cross_attention_layers",
)  # fmt: skip
"""Entries of configurations that make single layers unlike the others, without a list of all."""


def few_layers(config: Any) -> tuple[int, int] | None:
    """Two numbers of layers from which this transformers configuration is continued; None: too few layers, or not alike.

    Layers that alternate (sliding and full attention) are taken by whole periods.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    if layers < _MANY or any(getattr(text, name, None) for name in _UNEVEN):
        return None
    period = max((_period(value) for value in _by_layer(text).values()), default=1)
    small, large = (2, 4) if period == 1 else (period, 2 * period)
    return (small, large) if 2 * large <= layers else None


def shortened(config: Any, layers: int) -> Any:
    """The configuration with its first `layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in _by_layer(text).items():
        setattr(text, name, list(value[:layers]))
    text.num_hidden_layers = layers
    return config


def continued(small: T, large: T, few: tuple[int, int], layers: int) -> T:
    """Extrapolate every number of a dataclass linearly from two layer counts, `few`, to `layers`; other fields are those of `large`."""
    values = {}
    for item in fields(large):  # type: ignore[arg-type]
        at, beyond = getattr(small, item.name), getattr(large, item.name)
        if isinstance(beyond, (int, float)) and not isinstance(beyond, bool):
            value = beyond + (layers - few[1]) * (beyond - at) / (few[1] - few[0])
            values[item.name] = type(beyond)(value)
    return replace(large, **values)  # type: ignore[type-var]


def _by_layer(text: Any) -> dict[str, Any]:
    """Entries with one value a layer."""
    layers = text.num_hidden_layers
    return {name: v for name, v in vars(text).items() if isinstance(v, (list, tuple)) and len(v) == layers}


def _period(values: Any) -> int:
    """The smallest count after which the values repeat; their number where they do not."""
    whole = len(values)
    return next(p for p in range(1, whole + 1) if all(values[i] == values[i % p] for i in range(whole)))
