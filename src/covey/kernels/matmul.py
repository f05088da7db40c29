"""Matrix products of linear layers: rows that oneDNN compiles code for on a CPU, and layers whose products kernels may compute."""

import torch
from torch import Tensor, nn

ONEDNN_BYTES_PER_SHAPE = 580 * 2**10
"""Bytes of compiled code that oneDNN, which multiplies 16-bit matrices, keeps for each matmul shape until the process ends (measured
over a thousand shapes with torch 2.13; limits of its caches free a fifth of it). Compiling one shape takes up to a millisecond."""
PLAIN = (Tensor, nn.Parameter)
"""Tensor types that kernels may read: no DTensor or other subclass."""


def padded_rows(rows: int) -> int:
    """The next of eight row counts between a power of two and its double (beyond 4096, the next multiple of 256).

    oneDNN compiles, and keeps, code for each row count, so few counts should occur.
    """
    step = 1 << min(8, max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def code_bytes_per_product(dtype: torch.dtype) -> int:
    """Bytes of compiled code that oneDNN keeps for each matmul shape of a learner with matmuls in `dtype`, if it is used."""
    return ONEDNN_BYTES_PER_SHAPE if dtype in (torch.bfloat16, torch.float16) else 0


def is_hooked(module: nn.Module) -> bool:
    """True if calling the module does more than its forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)
