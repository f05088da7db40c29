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


def compare(kernels, logits, uniforms, seen=None, **way):
    params = SamplingParams(**way)
    expected = draw(logits, uniforms, params, seen=seen, with_entropy=True)
    tokens, logprobs, entropy = kernels.draw(logits, uniforms, seen=seen, with_entropy=True, **kernel_options(params))
    assert tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, expected.entropy, atol=1e-5, rtol=1e-5)
    return tokens
