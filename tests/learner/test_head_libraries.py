"""The output layer beside liger-kernel and cut-cross-entropy. `pip install triton liger-kernel cut-cross-entropy` to run them.

On a CPU liger-kernel runs in Triton's interpreter; cut-cross-entropy asks for CUDA. `benchmarks/heads.py` compares
their time and memory on a GPU.
"""

import pytest
import torch
from torch import nn

from covey.learner.logprobs import Head, score_tokens

pytest.importorskip("triton", reason="triton is not installed (286 MB, so not among the development tools)")
TOKENS, WIDTH, WORDS = 40, 64, 512
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def liger(hidden, weight, targets):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    found = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "none")
    return -(found[0] if isinstance(found, tuple) else found)


def cut(hidden, weight, targets):
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=None)


def own(hidden, weight, targets):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    del linear.weight
    linear.weight = nn.Parameter(weight.detach())
    logp, _ = score_tokens(hidden, targets, Head(linear), chunk=8)
    return logp, linear.weight


def compared(head, device, dtype, words=WORDS):
    """Largest error of log-probabilities, and relative error of both gradients, of this head and of Covey's, against float64."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw).to(dtype)
    weight = (0.2 * torch.randn(words, WIDTH, generator=draw)).to(dtype)
    targets, slopes = torch.randint(words, (TOKENS,), generator=draw), torch.randn(TOKENS, generator=draw)
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = torch.log_softmax(wide[0] @ wide[1].t(), -1).gather(1, targets[:, None]).squeeze(1)
    wanted = torch.autograd.grad((expected * slopes).sum(), wide)
    errors = []
    for is_own in (False, True):
        given = [x.to(device).requires_grad_() for x in (hidden, weight)]
        if is_own:
            logp, given[1] = own(given[0], given[1], targets.to(device))
        else:
            logp = head(*given, targets.to(device))
        found = torch.autograd.grad((logp * slopes.to(device)).sum(), given)
        gaps = [((a.double().cpu() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
        errors.append([(logp.detach().double().cpu() - expected).abs().max().item(), *gaps])
    return errors


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # triton 3.6
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without CUDA")
def test_liger_kernel_in_the_interpreter_is_as_exact_in_float32():
    pytest.importorskip("liger_kernel")
    theirs, mine = compared(liger, "cpu", torch.float32)
    assert max(theirs) < 2e-6
    assert max(mine) < 2e-6


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("name", ["liger_kernel", "cut_cross_entropy"])
def test_on_a_gpu_the_head_is_as_exact_as_the_libraries(name):
    pytest.importorskip(name)
    head = liger if name == "liger_kernel" else cut
    theirs, mine = compared(head, "cuda", torch.bfloat16, words=4096)
    for own_error, other in zip(mine, theirs, strict=True):
        assert own_error <= max(1.2 * other, 1e-2)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
def test_on_a_gpu_values_and_gradients_are_those_of_float64(dtype, bound):
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        _, mine = compared(own_alone, "cuda", dtype)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    assert max(mine) < bound


def own_alone(hidden, weight, targets):
    """The dense computation, in the place of a library."""
    return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.gpu
@ON_GPU
def test_on_a_gpu_a_wide_vocabulary_takes_no_more_than_its_workspace():
    from covey.learner.lm_head import BYTES_AN_ELEMENT, elements_at_a_time

    words, tokens, width = 151_936, 4096, 256
    linear = nn.Linear(width, words, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(words, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, entropy = score_tokens(hidden, targets, Head(linear), entropy=True)
    (logp.sum() + entropy.sum()).backward()
    above = torch.cuda.max_memory_allocated() - before - linear.weight.nbytes
    assert above < 1.2 * BYTES_AN_ELEMENT * elements_at_a_time(hidden.device) + 64 * hidden.nbytes
