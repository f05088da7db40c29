"""Copies of the model for processes that sample: the model as bytes, and the places of its weights in memory that is shared."""

import io
import pickle
from collections.abc import Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from covey.errors import ModelError

ALIGNMENT = 64
"""Alignment of tensors in the shared memory, in bytes."""


def _left_out(*_: Any, **__: Any) -> None:
    """Placeholder for an unpicklable function that only training calls."""


def _its_place() -> Any:
    return _left_out


class _Pickler(pickle.Pickler):
    """Pickler without local functions: hooks of gradient checkpointing, which sampling does not need."""

    def reducer_override(self, value: Any) -> Any:
        is_local = isinstance(value, FunctionType) and "<" in value.__qualname__
        is_of_training = type(value).__module__.startswith("covey.kernels")
        return (_its_place, ()) if is_local else (_left_out, ()) if is_of_training else NotImplemented


_PICKLE = SimpleNamespace(Pickler=_Pickler, __name__=__name__)
_OF_LIBRARIES = ("transformers", "peft", "torch", "accelerate", "covey")


def _refuse_local_hooks(model: nn.Module) -> None:
    """Raises ModelError for a forward hook that is a local function of the user's, without which the copy would compute otherwise."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if "<" in getattr(hook, "__qualname__", "") and hook.__module__.partition(".")[0] not in _OF_LIBRARIES:
                raise ModelError(
                    f"{name or 'the model'} has the forward hook {hook.__qualname__}, a local function, which cannot be copied to the "
                    "process that samples; define it at the top of a module, or leave async_rollouts out."
                )


def packed(model: nn.Module, tokenizer: Any) -> bytes:
    """Current model and tokenizer, serialized. Raises ModelError for a model that cannot be pickled."""
    _refuse_local_hooks(model)
    file = io.BytesIO()
    try:
        torch.save({"model": model, "tokenizer": tokenizer}, file, pickle_module=_PICKLE)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied to the process that samples ({error}); leave async_rollouts out."
        ) from error
    return file.getvalue()


def unpacked(sent: bytes, device: str) -> tuple[Any, Any]:
    """Model, on `device`, and tokenizer from the bytes of `packed`."""
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()  # makes remote code of a model importable by its name
    content = torch.load(io.BytesIO(sent), map_location=device, weights_only=False)  # trusted: written by this run
    model = content["model"].requires_grad_(False).eval()
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is _left_out]:
                del hooks[key]
    return model, content["tokenizer"]


def layout(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[dict[str, int], int]:
    """Offset of each tensor in one block of memory, and the size of the block, in bytes."""
    starts: dict[str, int] = {}
    end = 0
    for name, (shape, dtype) in shapes.items():
        starts[name] = end
        size = torch.Size(shape).numel() * dtype.itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, max(end, ALIGNMENT)


def views(path: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Tensors by name in the memory that processes share through the file `path`."""
    starts, size = layout(shapes)
    block = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    out = {}
    for name, (shape, dtype) in shapes.items():
        length = torch.Size(shape).numel() * dtype.itemsize
        out[name] = block[starts[name] : starts[name] + length].view(dtype).view(shape)
    return out
