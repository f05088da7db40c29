"""Kernels that a GPU would launch, counted on a CPU: every operation that computes, and a compiled function as what it launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
