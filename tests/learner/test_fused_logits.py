"""The output layer's compiled formulas over 16-bit logits: the values and gradients of float32 operations, by blocks."""

import functools

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from covey.kernels import LogitKernels
from covey.kernels.fused_layers import strictly_compiled
from covey.kernels.fused_logits import slopes, statistics
from covey.learner.lm_head import LinearLogProbability, LogitTransform
from covey.learner.vocabulary_blocks import by_vocabulary

HEADS = {
    "plain": {},
    "scaled, at a temperature": {"multiply": 0.5, "temperature": 0.7},
    "soft cap": {"softcap": 3.0, "temperature": 1.3},
    "bias": {"bias": True},
    "banned": {"bias": True, "banned": 5},
}


@pytest.mark.slow
def test_the_trial_compiles_the_two_kernels_that_all_passes_use():
    """As the learner calls them: the trial under autocast, passes with and without gradients, entropy in the loss or not."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    kernels = LogitKernels(functools.lru_cache(lambda formula: torch.compile(formula, backend=counter)))
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.tried(torch.device("cpu"), torch.bfloat16, 700) is None
    assert counter.frame_count == 2
    shape = LogitTransform(1.0, None, 1.0, 10, by_vocabulary=by_vocabulary, kernels=kernels)
    for count, takes_entropy in ((37, True), (23, False)):
        hidden, weight = torch.randn(count, 32).bfloat16().requires_grad_(), torch.randn(700, 32).bfloat16()
        run = lambda: LinearLogProbability.apply(hidden, weight, None, torch.arange(count), shape, True)  # noqa: B023
        with torch.no_grad():
            run()
        logp, entropy = run()
        (logp.sum() + entropy.sum() if takes_entropy else logp.sum()).backward()
    torch._dynamo.reset()
    assert counter.frame_count == 2


def by(kernels, dtype, *, multiply=1.0, softcap=None, temperature=1.0, bias=False, banned=None):
    """Log-probabilities, entropies and gradients of 37 tokens and a vocabulary of 700, in chunks of 10."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 32).to(dtype), (0.3 * torch.randn(700, 32)).to(dtype)
    offset = torch.randn(700).to(dtype) if bias else None
    if banned is not None:
        offset[banned] = -1e4
    targets = torch.randint(10, 700, (37,))
    leaves = [x.requires_grad_() for x in (hidden, weight, offset) if x is not None]
    shape = LogitTransform(multiply, softcap, temperature, 10, by_vocabulary=by_vocabulary, kernels=kernels)
    logp, entropy = LinearLogProbability.apply(hidden, weight, offset, targets, shape, True)
    loss = (logp * torch.linspace(-1, 1, 37)).sum() + 0.3 * (entropy * torch.linspace(1, 2, 37)).sum()
    return [logp.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype, slack", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_they_give_the_values_and_gradients_of_pytorchs_operations(name, dtype, slack):
    mine, theirs = (by(kernels, dtype, **HEADS[name]) for kernels in (LogitKernels(lambda formula: formula), None))
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= slack * other.double().norm()


def test_without_a_gradient_of_entropy_and_where_only_it_has_one():
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(60, 8)
    targets = torch.arange(9)

    def gradient(kernels, pick):
        shape = LogitTransform(1.0, None, 1.0, 4, by_vocabulary=by_vocabulary, kernels=kernels)
        return torch.autograd.grad(
            LinearLogProbability.apply(hidden, weight, None, targets, shape, True)[pick].sum(), hidden
        )[0]

    for pick in (0, 1):
        torch.testing.assert_close(gradient(LogitKernels(lambda formula: formula), pick), gradient(None, pick))


def test_a_token_of_probability_0_has_no_gradient_and_is_no_part_of_the_entropy():
    product = torch.tensor([[0.0, -torch.inf, 1.0]])
    logp, normalizer, entropy = statistics(product, torch.tensor([2]), (1.0, None, 1.0))
    p = torch.tensor([0.0, 1.0]).softmax(0)
    assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()))
    found = slopes(product, torch.tensor([2]), normalizer, entropy, torch.ones(1), torch.ones(1), (1.0, None, 1.0))
    assert found.isfinite().all()
    assert float(found[0, 1]) == 0.0
    assert float(logp) == pytest.approx(float(p[1].log()))


@pytest.mark.parametrize("vocabulary", [64, 700, 33])
def test_a_row_is_summed_in_equal_parts_of_which_one_may_have_no_probability(vocabulary):
    torch.manual_seed(0)
    product, targets = 5 * torch.randn(3, vocabulary), torch.tensor([vocabulary - 1, vocabulary - 2, 30])
    product[:2, : vocabulary // 3] = -torch.inf
    logp, normalizer, entropy = statistics(product, targets, (1.0, None, 1.0))
    expected = torch.distributions.Categorical(logits=product.double().clamp(min=-1e30))
    torch.testing.assert_close(logp, expected.log_prob(targets).float())
    torch.testing.assert_close(normalizer, product.logsumexp(-1))
    torch.testing.assert_close(entropy, expected.entropy().float())


def test_a_compiler_that_fails_or_computes_something_else_is_not_used():
    def failing(formula):
        raise RuntimeError("no compiler")

    wrong = lambda formula: formula if formula is statistics else lambda *given: 2 * slopes(*given)
    cpu = torch.device("cpu")
    assert "(RuntimeError: no compiler)" in LogitKernels(failing).tried(cpu, torch.bfloat16, 300)
    assert LogitKernels(wrong).tried(cpu, torch.bfloat16, 300).startswith("their kernels differ")
    assert LogitKernels(lambda formula: formula).tried(cpu, torch.bfloat16, 300) is None
    assert LogitKernels.on(cpu, torch.bfloat16, 300) is None


@pytest.mark.parametrize("shape", [(0.5, None, 1.0), (1.0, None, 0.7), (1.0, 3.0, 1.0)])
def test_the_trial_has_the_heads_own_factor_cap_and_temperature(shape):
    """Constants are compiled into a kernel, so each head's is another one."""
    cpu = torch.device("cpu")
    plain = (1.0, None, 1.0)
    blind = lambda formula: lambda *args: formula(*args[:-1], plain)
    assert LogitKernels(blind).tried(cpu, torch.bfloat16, 300, plain) is None
    assert LogitKernels(blind).tried(cpu, torch.bfloat16, 300, shape).startswith("their kernels differ")


@pytest.mark.nightly
def test_the_compilers_own_kernels_agree():
    """By inductor's C++ backend, which fuses by the same scheduler as for a GPU."""
    torch._dynamo.reset()
    assert LogitKernels(strictly_compiled).tried(torch.device("cpu"), torch.bfloat16, 300) is None
