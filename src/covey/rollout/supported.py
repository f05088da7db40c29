"""Models that the engine rules out by their configuration or class."""

from torch import nn

from covey.errors import Unsupported
from covey.kernels import has_states, other_layers
from covey.models import accepts, decoder_of, unwrapped


def expect_supported(model: nn.Module) -> None:
    """Raise Unsupported for a model whose configuration or class rules the engine out."""
    inner = unwrapped(model)
    name = type(inner).__name__
    is_stateful = has_states(inner)
    if kinds := other_layers(inner):
        raise Unsupported(f"{name} has layers of kind {', '.join(sorted(kinds))}")
    attends = any(getattr(part, "_supports_attention_backend", False) for part in (inner, decoder_of(inner)))
    if not is_stateful and not attends:
        raise Unsupported(f"{name} does not attend through transformers' attention interface")
    expect_on_one_device(inner)
    if not is_stateful and not accepts(inner, "position_ids"):
        raise Unsupported(f"{name} does not take position_ids")


def expect_on_one_device(inner: nn.Module) -> None:
    """Raise Unsupported for weights that are spread over several devices or processes."""
    name = type(inner).__name__
    if len({parameter.device for parameter in inner.parameters()}) > 1:
        raise Unsupported(f"{name} is spread over several devices")
    if any(type(parameter).__name__ == "DTensor" for parameter in inner.parameters()):
        raise Unsupported(f"the weights of {name} are spread over several processes")
