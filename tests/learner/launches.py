"""Kernels that a GPU would launch, counted on a CPU: every operation that computes, and a compiled function as what it launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from kit import tiny_model

SEVERAL = {"rms_norm_backward": 3, "attention backward": 2}
"""Kernels of more than one launch: a norm's input, and its weight in two passes; FlexAttention's row sums and the rest."""
_FREE = ("empty", "_unsafe_view", "detach", "lift_fresh", "set_", "_local_scalar_dense")


class Launches(TorchDispatchMode):
    """Counts operations; inside of `counted` the whole function counts as its launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.is_inside = False
        self.casts: list[tuple[int, torch.dtype]] = []
        """Address of what each cast reads, and the dtype that it makes."""

    @property
    def total(self) -> int:
        return sum(self.names.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__
        if not self.is_inside and not function.is_view and not any(word in name for word in _FREE):
            self.names[name] += 1
            if name == "_to_copy.default":
                self.casts.append((args[0].data_ptr(), result.dtype))
        return result

    def compiled(self, function: Any) -> Any:
        """`function` as a compiled one, without gradient: one launch, or those that `SEVERAL` says."""
        return lambda *given: self._within(function.__name__, lambda: function(*given))

    def counted(self, function: Any) -> Any:
        """`function` with gradient: a compiled one forward, and another backward."""
        name = function.__name__

        class One(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Any) -> Any:
                ctx.given = given
                return self._within(name, lambda: function(*given))

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                tensors = [x for x in ctx.given if isinstance(x, torch.Tensor)]
                wanted = [i for i, x in enumerate(ctx.given) if ctx.needs_input_grad[i]]

                def work() -> Any:
                    with torch.enable_grad():
                        leaves = {i: ctx.given[i].detach().requires_grad_() for i in wanted}
                        out = function(*(leaves.get(i, x) for i, x in enumerate(ctx.given)))
                        out = out if isinstance(out, tuple) else (out,)
                        return torch.autograd.grad(out, [leaves[i] for i in wanted], gradients)

                assert tensors
                found = dict(zip(wanted, self._within(f"{name} backward", work), strict=True))
                return tuple(found.get(i) for i in range(len(ctx.given)))

        return lambda *given: One.apply(*given)

    def _within(self, name: str, work: Any) -> Any:
        if self.is_inside:
            return work()
        self.names[name] += SEVERAL.get(name, 1)
        self.is_inside = True
        try:
            return work()
        finally:
            self.is_inside = False


OTHERS = {
    "gemma3": ("Gemma3Text", {"layer_types": ["full_attention"] * 3}),
    "phi3": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "glm4": ("Glm4", {}),
    "olmo2": ("Olmo2", {}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 4, "layer_types": ["full_attention"] * 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""GELU; a merged product of gate and up with heads of which half turn; partners that are neighbours; norms after attention; experts, twice."""


def built(arch: str, layers: int, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A tiny model of a family; `more` goes to its configuration."""
    if arch not in OTHERS:
        return tiny_model(arch, layers=layers, hidden=64, dtype=dtype, **more)
    prefix, options = OTHERS[arch]
    options = {name: value[:layers] if name == "layer_types" else value for name, value in options.items()}
    config = getattr(transformers, f"{prefix}Config")(
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 300, "max_position_embeddings": 256},
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": True, **options, **more},
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).to(dtype)
