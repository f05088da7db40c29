"""Norms and rotary embeddings of a model's own modules in one Triton kernel each, for a sampler's passes on a GPU.

The modules stay transformers' own; what lies between their products takes one launch in place of five to ten. A module or function
is recognised by comparing its output with the formula on random inputs; others are not changed. Numbers are those of `fused_layers`,
by which the learner computes: float32 inside, rounded once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.kernels.fused_layers import is_fused
from covey.kernels.norms import Norm, feeding_products, product_dtype, recognised_norm, weight_of
from covey.kernels.rotations import Rotation, as_called, heads_of, replace_rotations
from covey.kernels.triton_decode import TritonDecode
from covey.models import computing, decoder_of

Run = Callable[[], Tensor]
"""Forward pass of a few tokens by the modules as they are; returns the logits."""

_here = threading.local()  # `steps`: the `StepKernels` whose pass this thread computes


class StepKernels:
    """The recognised norms and rotations of one model, which compute in kernels inside of `computing()`."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        """`run` shows which norms feed products alone: rounding what they return changes no bit of its logits."""
        decoder = decoder_of(model)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            candidates = [module for module in decoder.modules() if is_fused(module.__dict__.get("forward"))]
            kinds = {module: kind for module in candidates if (kind := recognised_norm(module)) is not None}
            self.count = len(kinds) + replace_rotations(decoder, _rotate)
            self.feeding = set(feeding_products(decoder, kinds, run)) if kinds else set()
        self.norms = {module: partial(_norm, module, kind, module in self.feeding) for module, kind in kinds.items()}
        """Forward of each norm."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which this thread's passes of the model compute in the kernels."""
        with ExitStack() as stack:
            for module, forward in self.norms.items():
                if is_fused(module.__dict__.get("forward")):  # not replaced since
                    stack.enter_context(computing(module, forward))
            before, _here.steps = getattr(_here, "steps", None), self
            try:
                yield
            finally:
                _here.steps = before


def _norm(module: nn.Module, kind: Norm, feeds_products: bool, /, *args: Any, **others: Any) -> Tensor:
    dtype = product_dtype(args[0]) if args else None
    if dtype is None or any(value is not None for value in (*args[1:], *others.values())):  # a gate
        plain: Tensor = type(module).forward(module, *args, **others)
        return plain
    made = dtype if feeds_products else args[0].dtype
    return TritonDecode.norm(args[0], weight_of(module), kind.epsilon, kind.offset, made)


def _rotate(plain: Callable[..., Any], kind: Rotation, /, *args: Any, **others: Any) -> Any:
    """Rotary embedding of queries and keys, or of one of them, in the kernel where this thread's pass computes so."""
    xs = heads_of(kind, args, others) if getattr(_here, "steps", None) is not None else None
    dtype = None if xs is None else product_dtype(xs[0])
    if xs is None or dtype is None:
        return plain(*args, **others)
    turned = [TritonDecode.rotate(x, args[-2], args[-1], kind.pairs, kind.by_pair, dtype) for x in xs]
    return as_called(kind, turned, others)
