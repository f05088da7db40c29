"""Logits read by kernels on a CPU: the numbers and gradients of PyTorch's operations, in one place instead of three."""

import pytest
import torch
from torch import nn

from covey import compiled
from covey.compiled import head as kernels
from covey.learner import fused_head
from covey.learner.logprobs import Head, score_tokens
from kit import forgotten

REASON = compiled.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def measured(dtype, by_kernels, monkeypatch, *, vocabulary=301, entropy=True, bias=True, multiply=1.5, rows=70):
    """Log-probabilities and entropies of random tokens, and the gradients of all that went in, in float32."""
    torch.manual_seed(0)
    linear = nn.Linear(16, vocabulary, bias=bias).to(dtype)
    hidden = torch.randn(rows, 16).mul(3).to(dtype).requires_grad_()
    targets, weight = torch.randint(vocabulary, (rows,)), torch.randn(2, rows)
    with monkeypatch.context() as patch:
        if not by_kernels:
            patch.setattr(fused_head, "kernels_for", lambda weight: None)
        logp, entropies = score_tokens(
            hidden, targets, Head(linear, multiply=multiply), temperature=0.7, entropy=entropy, chunk=32
        )
        loss = (logp * weight[0]).sum() + ((entropies * weight[1]).sum() if entropy else 0.0)
        gradients = torch.autograd.grad(loss, [hidden, *linear.parameters()])
    return [x.detach().float() for x in (logp, entropies, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("vocabulary", [16, 301, 4096])
def test_values_and_gradients_are_those_of_pytorchs_operations(vocabulary, entropy, dtype, monkeypatch):
    given = {"vocabulary": vocabulary, "entropy": entropy, "bias": vocabulary == 301}
    found = measured(dtype, True, monkeypatch, **given)
    expected = measured(dtype, False, monkeypatch, **given)
    slack = 1e-5 if dtype == torch.float32 else 1e-2
    for one, two in zip(found, expected, strict=True):
        assert (one - two).norm() <= slack * two.norm()
    assert entropy or not found[1].any()


def test_the_entropy_alone_has_a_gradient_too(monkeypatch):
    linear = nn.Linear(16, 50)
    hidden = torch.randn(9, 16, requires_grad=True)
    targets = torch.randint(50, (9,))
    _, entropy = score_tokens(hidden, targets, Head(linear), entropy=True)
    logs = torch.log_softmax(linear(hidden), -1)
    expected = torch.autograd.grad(-(logs.exp() * logs).sum(), [hidden, linear.weight])
    for one, two in zip(torch.autograd.grad(entropy.sum(), [hidden, linear.weight]), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_that_cannot_happen_has_no_share_and_what_is_no_number_shows(dtype):
    logits = torch.zeros(3, 20, dtype=dtype)
    logits[0, 1:] = float("-inf")
    logits[1, 5] = float("nan")
    targets = torch.tensor([0, 0, 19])
    logp, normalizer, entropy = torch.empty(3, 3)
    found = kernels.kernels_for(logits)
    found.score(logits, targets, 1.0, logp, normalizer, entropy)
    assert logp[0].item() == pytest.approx(0.0, abs=1e-6)
    assert entropy[0].item() == pytest.approx(0.0, abs=1e-6)
    assert logp[1].isnan()
    assert entropy[1].isnan()
    assert entropy[2].item() == pytest.approx(torch.tensor(20.0).log().item(), rel=1e-5)
    found.backward(logits, targets, 1.0, normalizer, entropy, torch.ones(3), torch.ones(3))
    assert logits[0].float().abs().max() < 1e-6
    assert logits[1].isnan().any()


def test_logits_that_are_far_apart_overflow_nothing():
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]])
    logp, normalizer, entropy = torch.empty(3, 2)
    kernels.kernels_for(logits).score(logits, torch.tensor([1, 2]), 1.0, logp, normalizer, entropy)
    torch.testing.assert_close(logp, torch.tensor([-6e4, -1.0986]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(entropy, torch.tensor([0.0, 1.0986]), rtol=1e-3, atol=1e-3)


def test_a_soft_cap_and_float64_are_pytorchs(monkeypatch):
    called = []
    monkeypatch.setattr(kernels.Kernels, "score", lambda *args: called.append(args))
    score_tokens(torch.randn(3, 8), torch.zeros(3, dtype=torch.long), Head(nn.Linear(8, 20), softcap=3.0))
    score_tokens(torch.randn(3, 8).double(), torch.zeros(3, dtype=torch.long), Head(nn.Linear(8, 20).double()))
    assert not called


def test_switched_off_there_are_no_kernels(monkeypatch):
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    with forgotten(kernels._verified, compiled.library):
        assert kernels.kernels_for(torch.zeros(1)) is None
