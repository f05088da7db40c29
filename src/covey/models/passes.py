"""A loaded model's parts, and contexts of its forward pass: evaluation, precision, a module's own computation."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from covey.models.products import settle_products

logger = logging.getLogger(__name__)


def unwrapped(model: Any) -> Any:
    """The causal LM inside adapters and inside wrappers for several processes."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: nn.Module) -> Any:
    """The decoder inside the causal LM, which gives hidden states; the model itself where it names none."""
    inner = unwrapped(model)
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    if decoder is inner:  # Llama 4 says so of itself
        decoder = getattr(inner, "model", inner)
    return decoder if isinstance(decoder, nn.Module) else inner


def encoder_of(model: nn.Module) -> Any:
    """The model without its LM head: hidden states of token ids and media."""
    inner = unwrapped(model)
    return getattr(inner, inner.base_model_prefix, inner)


def accepts(model: nn.Module, name: str) -> bool:
    """True if the model's forward has a parameter of this name."""
    return name in inspect.signature(unwrapped(model).forward).parameters


@contextmanager
def computing(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context in which a module computes `forward`; one that it had on the instance is put back."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def float32_stream(model: nn.Module) -> Iterator[None]:
    """Context in which a model with bfloat16 weights computes as one with float32 weights does under autocast; a no-op for others.

    Products are bfloat16, but those whose operands the model's code casts to float32; the residual stream is float32. Rounded to
    bfloat16 after every layer, the streams of sampler and learner would drift apart, because their kernels add the same numbers in
    another order.
    """
    settle_products(unwrapped(model))
    if not widens_stream(model):
        yield
        return
    inner = unwrapped(model)
    hook = inner.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.float())
    try:
        # autocast's weight cache has nothing to do, and a captured step must not fill it
        with torch.autocast(next(inner.parameters()).device.type, torch.bfloat16, cache_enabled=False):
            yield
    finally:
        hook.remove()


_widened: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Models with bfloat16 weights: true where a float32 residual stream ran on four tokens."""


def widens_stream(model: nn.Module) -> bool:
    """True if `float32_stream` widens the residual stream of this model: its weights are bfloat16, and a trial ran."""
    inner = unwrapped(model)
    embedding = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    weight = getattr(embedding, "weight", None)
    if weight is None or weight.dtype != torch.bfloat16 or reads_media(model):
        return False
    if inner not in _widened:
        _widened[inner] = True  # for the trial
        _widened[inner] = _runs_widened(inner, weight)
    return _widened[inner]


def _runs_widened(model: nn.Module, weight: Tensor) -> bool:
    ids = (torch.arange(4, device=weight.device) * 7919 % len(weight))[None]
    try:
        with evaluating(model), float32_stream(model):
            decoder_of(model)(input_ids=ids, use_cache=False)
    except (RuntimeError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("%s keeps its residual stream in bfloat16: %s.", type(model).__name__, lines[0][:200])
        return False
    return True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode is restored on every exit.

    Gradient checkpointing, which forbids a cache, is active in training mode only, so it is off inside too.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:  # `model.eval()` would write to every module
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def dropouts(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The model's probabilities of dropout, each as a mapping and its key there: layers', those that attention reads as a number,
    and an adapter's, which LoHa and LoKr hold in a dict by its name."""
    for module in model.modules():
        fields = vars(module)
        for name in fields:
            is_layers = name == "p" and (isinstance(module, nn.Dropout) or "Dropout" in type(module).__name__)
            if not is_layers and not name.endswith(("dropout", "layerdrop")):
                continue
            is_dict = isinstance(fields[name], dict)
            place = fields[name] if is_dict else fields
            yield from ((place, key) for key in (place if is_dict else [name]) if isinstance(place[key], float))


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability of the model to 0."""
    for place, key in dropouts(model):
        place[key] = 0.0


def reads_media(model: nn.Module) -> bool:
    """True for a model, or a configuration of one, that reads images, sounds or videos."""
    config = getattr(unwrapped(model), "config", model)
    return any(getattr(config, name, None) is not None for name in ("vision_config", "audio_config"))
