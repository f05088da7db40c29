"""Log-probability and entropy by chunk: the dense numbers and gradients, without the dense memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.learner import lm_head, logprobs, vocabulary_blocks
from covey.learner.lm_head import LogitTransform, Workspace, chunk_for
from covey.learner.logprobs import Head, score_logits, score_tokens
from covey.learner.vocabulary_blocks import block_of


def dense(hidden, targets, head, temperature):
    logp = torch.log_softmax(head.logits(hidden) / temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


class Adapted(nn.Module):
    """A head that is not a plain linear layer, as an adapter on it makes it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("kind", ["plain", "adapted"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_give_the_dense_values_and_gradients(chunk, temperature, softcap, kind):
    linear = nn.Linear(8, 50, bias=True).double()
    head = Head(project=linear if kind == "plain" else Adapted(linear), multiply=1.5, softcap=softcap)
    hidden = torch.randn(11, 8, dtype=torch.double, requires_grad=True)
    targets = torch.randint(50, (11,))
    weight = torch.randn(11)

    def gradients(logp, entropy):
        loss = (weight * logp).sum() + 0.3 * entropy.sum()
        return torch.autograd.grad(loss, [hidden, linear.weight, linear.bias])

    logp, entropy = score_tokens(hidden, targets, head, temperature=temperature, entropy=True, chunk=chunk)
    want_logp, want_entropy = dense(hidden, targets, head, temperature)
    torch.testing.assert_close(logp, want_logp, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-9, atol=1e-10)
    for got, want in zip(gradients(logp, entropy), gradients(want_logp, want_entropy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_a_term_that_is_not_asked_for_costs_no_gradient():
    linear = nn.Linear(8, 50).double()
    hidden = torch.randn(5, 8, dtype=torch.double, requires_grad=True)
    targets = torch.randint(50, (5,))
    only_entropy = score_tokens(hidden, targets, Head(linear), entropy=True)[1].sum()
    want = dense(hidden, targets, Head(linear), 1.0)[1].sum()
    for got, expected in zip(
        torch.autograd.grad(only_entropy, [hidden, linear.weight]),
        torch.autograd.grad(want, [hidden, linear.weight]),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    frozen = nn.Linear(8, 50).requires_grad_(False)
    logp, _ = score_tokens(hidden.float().detach().requires_grad_(), targets, Head(frozen))
    logp.sum().backward()
    assert frozen.weight.grad is None


@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_no_logits_larger_than_a_chunk_ever_exist(kind):
    largest = []

    class Watched(TorchDispatchMode):
        """Sees the result of every operation of torch, those of the backward pass included."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor))
            return out

    linear = nn.Linear(4, 997, bias=False)
    head = Head(linear if kind == "plain" else Adapted(linear))
    hidden = torch.randn(64, 4, requires_grad=True)
    with Watched():
        logp, entropy = score_tokens(hidden, torch.randint(997, (64,)), head, entropy=True, chunk=8)
        (logp.sum() + entropy.sum()).backward()
    assert max(largest) == 8 * 997


def test_in_bfloat16_the_last_chunk_has_one_of_few_counts_of_rows_and_nothing_else_changes(monkeypatch):
    torch.manual_seed(0)
    linear = nn.Linear(8, 50).bfloat16()
    sizes, product = set(), Workspace.product
    monkeypatch.setattr(Workspace, "product", lambda space, rows: sizes.add(len(rows)) or product(space, rows))
    for count in range(65, 129):
        hidden = torch.randn(count, 8, dtype=torch.bfloat16, requires_grad=True)
        targets, weight = torch.randint(50, (count,)), torch.randn(count)
        found, wanted = [], []
        for got, (logp, entropy) in (
            (found, score_tokens(hidden, targets, Head(linear), entropy=True, chunk=64)),
            (wanted, dense(hidden, targets, Head(linear), 1.0)),
        ):
            slopes = torch.autograd.grad((weight * logp).sum() + entropy.sum(), [hidden, linear.weight, linear.bias])
            got += [logp.detach(), entropy.detach(), *slopes]
        assert found[0].shape == (count,)
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).norm() < 0.02 * other.norm()
    assert sizes == {*range(1, 17), *range(18, 33, 2), *range(36, 65, 4)}


def test_a_token_that_cannot_happen_leaves_the_entropy_finite():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    logp, entropy = score_logits(logits, torch.tensor([0]), 1.0, True)
    assert logp.item() == pytest.approx(-0.6931472)
    assert entropy.item() == pytest.approx(0.6931472)


def test_no_tokens_give_no_values():
    logp, entropy = score_tokens(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), Head(nn.Linear(4, 5)))
    assert logp.shape == entropy.shape == (0,)


@pytest.fixture
def by_vocabulary(monkeypatch):
    """The backward pass of an accelerator, on a CPU."""
    monkeypatch.setattr(
        logprobs,
        "LogitTransform",
        lambda *given, **named: LogitTransform(*given, **{**named, "by_vocabulary": vocabulary_blocks.by_vocabulary}),
    )


@pytest.mark.parametrize("terms", ["both", "logp", "entropy"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_blocks_of_the_vocabulary_give_the_dense_gradients(chunk, softcap, bias, terms, by_vocabulary):
    linear = nn.Linear(8, 300, bias=bias).double()
    head = Head(project=linear, multiply=1.5, softcap=softcap)
    hidden = torch.randn(11, 8, dtype=torch.double, requires_grad=True)
    targets, slope = torch.randint(300, (11,)), torch.randn(11)
    targets[:3] = torch.tensor([0, 299, 128])

    def gradients(logp, entropy):
        loss = (slope * logp).sum() * (terms != "entropy") + 0.3 * entropy.sum() * (terms != "logp")
        return torch.autograd.grad(loss, [hidden, *linear.parameters()])

    found = gradients(*score_tokens(hidden, targets, head, temperature=0.7, entropy=True, chunk=chunk))
    for got, want in zip(found, gradients(*dense(hidden, targets, head, 0.7)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_a_block_has_as_many_logits_as_a_chunk_and_the_weights_gradient_is_made_once(by_vocabulary):
    made = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend((func, tuple(x.shape)) for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    tokens, words = 500, 4096
    linear = nn.Linear(16, words, bias=False)
    hidden = torch.randn(tokens, 16, requires_grad=True)
    logp, entropy = score_tokens(hidden, torch.randint(words, (tokens,)), Head(linear), entropy=True, chunk=40)
    with Watched():
        (logp.sum() + entropy.sum()).backward()
    blocks = -(-words // block_of(40, tokens, words))
    assert max(torch.Size(shape).numel() for _, shape in made if shape != (words, 16)) <= max(40 * words, 128 * tokens)
    adds = [func for func, shape in made if shape == (words, 16) and "add" in str(func)]
    assert not adds, "no product is added to the weight's gradient"
    assert (
        len([shape for func, shape in made if "mm" in str(func) and shape[1:] == (16,) and shape[0] < tokens]) == blocks
    )


def test_a_frozen_weight_or_frozen_hidden_states_get_no_gradient_by_blocks(by_vocabulary):
    linear, hidden = nn.Linear(8, 300).requires_grad_(False), torch.randn(5, 8, requires_grad=True)
    targets = torch.randint(300, (5,))
    score_tokens(hidden, targets, Head(linear))[0].sum().backward()
    assert linear.weight.grad is None
    assert hidden.grad is not None
    linear.requires_grad_(True)
    score_tokens(hidden.detach(), targets, Head(linear))[0].sum().backward()
    assert linear.weight.grad is not None


@pytest.mark.parametrize(
    "gib, vocabulary, expected",
    [
        (80, 152_000, 883),
        (80, 32_000, 4194),
        (80, 4096, 8192),
        (24, 152_000, 220),
        (16, 152_000, 110),
        (1, 152_000, 55),
    ],
)
def test_tokens_at_a_time_follow_from_the_devices_memory_and_the_vocabulary(gib, vocabulary, expected, monkeypatch):
    monkeypatch.setattr(lm_head, "device_memory", lambda device: gib * 2**30)
    assert chunk_for(vocabulary, None, torch.device("cuda")) == expected
    assert chunk_for(vocabulary, 7, torch.device("cuda")) == 7
    assert expected * vocabulary * lm_head.BYTES_AN_ELEMENT <= max(gib * 2**30 / 32, 2**23 * 20)


def test_on_a_cpu_tokens_at_a_time_do_not_depend_on_its_memory():
    assert chunk_for(152_000, None, torch.device("cpu")) == 55
    assert chunk_for(4096, None, torch.device("cpu")) == 1024
