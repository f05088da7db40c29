"""Triton's kernels in its interpreter on a CPU, and the cases that a card repeats."""

import numpy
import pytest
import torch

from covey.rollout.sampler import SamplingParams
from covey.rollout.sampling import draw
from covey.rollout.truncation import kernel_options

triton = pytest.importorskip("triton", reason="triton is not installed (286 MB, so not among the development tools)")
IS_TOO_OLD = triton.__version__.startswith("3.6") and not numpy.__version__.startswith(
    ("1.", "2.0", "2.1", "2.2", "2.3")
)
IN_THE_INTERPRETER = [
    pytest.mark.skipif(IS_TOO_OLD, reason="the interpreter of triton 3.6 needs a numpy below 2.4"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # triton 3.6
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NaN is an answer here
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without CUDA"),
]
WAYS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "top-k": {"temperature": 0.7, "top_k": 4},
    "top-k of all": {"top_k": 100_000},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "all three": {"top_k": 50, "top_p": 0.5, "min_p": 0.01},
    "penalty": {"repetition_penalty": 1.3, "temperature": 1.5},
}


def drawn(kernels, logits, uniforms, params, seen=None):
    """Tokens [R] and log-probabilities [R] that the kernels draw from `logits` [R, V] for rows that all run."""
    rows, device = len(logits), logits.device
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(*shape, dtype=dtype, device=device)
    state = kernels.RowState(
        token=zeros(rows),
        position=zeros(rows),
        written=zeros(rows),
        limit=zeros(rows) + 2,
        output_row=torch.arange(rows, device=device),
        live=zeros(rows, dtype=torch.bool) | True,
        stopped=zeros(rows, dtype=torch.bool),
        first=zeros(rows, dtype=torch.int32),
        is_eos=zeros(logits.shape[1], dtype=torch.bool),
        tokens=zeros(rows + 1, 1),
        logprobs=zeros(rows + 1, 1, dtype=torch.float32),
        uniforms=torch.nn.functional.pad(uniforms, (0, 1))[:, None],
        never=2**30,
        ends=False,
    )
    kernels.draw_into(state, logits, seen=None if seen is None else seen.clone(), **kernel_options(params))
    return state.tokens[:rows, 0], state.logprobs[:rows, 0]


def compare(kernels, logits, uniforms, seen=None, **way):
    params = SamplingParams(**way)
    expected = draw(logits, uniforms, params, seen=seen)
    tokens, logprobs = drawn(kernels, logits, uniforms, params, seen)
    assert tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs, atol=3e-6, rtol=1e-5)
    return tokens
