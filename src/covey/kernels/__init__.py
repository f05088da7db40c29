"""Faster kernels with the results of PyTorch: C++ on a CPU, Triton and FlexAttention on a GPU.

Other rooms import these names from here, never from a file of this folder. If a kernel cannot run on a machine, or its
results differ from PyTorch's, PyTorch computes.
"""

from covey.kernels.adapted_layers import add_adapters_inside_products
from covey.kernels.attention_product import AttentionProduct, Layout
from covey.kernels.compile import unavailable_reason
from covey.kernels.decode import CacheTables, DecodeKernels, DecodeStep, DecodeWeights, decode_kernels
from covey.kernels.flex_attention import AttentionHeads, SharedPromptAttention
from covey.kernels.fused_layers import fuse, sampling, triton_unavailable_reason
from covey.kernels.fused_logits import LogitKernels
from covey.kernels.half_weights import HalfWeights, share_copies
from covey.kernels.heap import training_heap, zeros
from covey.kernels.indexers import (
    CHOICE,
    IndexCache,
    choices,
    choosing_few,
    find_indexers,
    has_windows,
    is_chosen,
    other_layers,
    reason_against_choices,
)
from covey.kernels.matmul import code_bytes_per_product, padded_rows
from covey.kernels.routers import Routers, expert_layers, find_routers
from covey.kernels.sampler_linear import InPlaceLinear, SamplerLinear, has_bfloat16, with_adapters
from covey.kernels.state_steps import cache_factory, cache_keyword, has_states, in_place_steps, state_steps, tensors_on
from covey.kernels.step_kernels import StepKernels
from covey.kernels.triton_decode import TritonDecode
from covey.kernels.windows import Window, attention_windows

__all__ = [
    "CHOICE", "AttentionHeads", "AttentionProduct", "CacheTables", "DecodeKernels", "DecodeStep", "DecodeWeights",
    "HalfWeights", "InPlaceLinear", "IndexCache", "Layout", "LogitKernels", "Routers", "SamplerLinear",
    "SharedPromptAttention", "StepKernels", "TritonDecode", "Window", "add_adapters_inside_products",
    "attention_windows", "cache_factory", "cache_keyword", "choices", "choosing_few", "code_bytes_per_product",
    "decode_kernels", "expert_layers", "find_indexers", "find_routers", "fuse", "has_bfloat16", "has_states",
    "has_windows", "in_place_steps", "is_chosen", "other_layers", "padded_rows", "reason_against_choices", "sampling",
    "share_copies", "state_steps", "tensors_on", "training_heap", "triton_unavailable_reason", "unavailable_reason",
    "with_adapters", "zeros",
]  # fmt: skip
