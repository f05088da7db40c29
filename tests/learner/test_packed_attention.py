"""The kernels that the learner attends with on a CPU: those of plain attention in value and gradient, and done without."""

import ctypes
import logging

import pytest
import torch
from shared_rows import ROWS, assert_same, checkpointing, gradients

from covey.kernels import compile as compiled
from covey.kernels import packed_attention, shared_attention
from covey.kernels.attention_product import Layout
from covey.kernels.packed_attention import SOURCE, PackedAttention, packed_attention_for
from covey.kernels.shared_attention import SharedAttention
from covey.learner import shared_prompt
from covey.learner.policy import Policy
from covey.process.memory import is_out_of_memory
from kit import AVX2_ALONE, forgotten, threads, tiny_model

REASON = compiled.unavailable_reason()
needs_kernels = pytest.mark.skipif(REASON is not None, reason=str(REASON))

LAYOUTS = (Layout(0, 5, (3, 0, 7, 24, 25)), Layout(64, 31, ()), Layout(95, 40, (150, 1, 49)), Layout(335, 1, (2,)))
"""Completions of no tokens, of one, of a whole block of queries and of one more; prompts of one token, and without any completion."""
TOKENS = 338


@pytest.fixture
def one_thread():
    with threads(1):
        yield


@pytest.fixture
def fresh():
    """What is known of the kernels is found out again, and forgotten afterwards."""
    with forgotten(packed_attention._verified, compiled.load, compiled._log_unavailable):
        yield


def given(dtype, heads, repeats, width, seed=0):
    """Queries, keys, values, and the gradient of what comes out, as the model's projections lay them out: tokens outermost."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda count: torch.randn(TOKENS, count, width, generator=generator).to(dtype).transpose(0, 1)
    return make(heads * repeats), make(heads), make(heads), make(heads * repeats)


def through(kernels, inputs, monkeypatch):
    """What comes out and the three gradients, in float32, by these kernels or, without any, by PyTorch's operations."""
    monkeypatch.setattr(shared_attention, "packed_attention_for", lambda *_: kernels)
    *leaves, gradient = inputs
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = SharedAttention.apply(*leaves, LAYOUTS, 0.2)
    return [x.float() for x in (out.detach(), *torch.autograd.grad(out, leaves, gradient))]


def assert_near(found, expected, slack):
    for one, two in zip(found, expected, strict=True):
        assert (one - two).norm() <= slack * two.norm()


@needs_kernels
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("width", "repeats"), [(16, 1), (32, 1), (64, 4), (80, 3), (112, 2), (128, 2), (256, 1)])
def test_kernels_attend_as_pytorchs_operations_do_in_value_and_gradient(
    dtype, slack, width, repeats, one_thread, monkeypatch
):
    inputs = given(dtype, 2, repeats, width)
    kernels = packed_attention_for(inputs[0], inputs[1], LAYOUTS)
    assert kernels is not None
    exact = through(None, [x.double() for x in inputs], monkeypatch)
    assert_near(through(kernels, inputs, monkeypatch), exact, slack)


@needs_kernels
def test_numbers_anywhere_in_memory_are_read_where_they_are(one_thread, monkeypatch):
    """Heads outermost, and a gradient that is one number for all, as the sum of everything gives."""
    inputs = [x.contiguous() for x in given(torch.float32, 2, 2, 32)]
    inputs[3] = torch.ones(()).expand(inputs[0].shape)
    kernels = packed_attention_for(inputs[0], inputs[1], LAYOUTS)
    assert_near(through(kernels, inputs, monkeypatch), through(None, inputs, monkeypatch), 1e-5)


@needs_kernels
def test_scores_as_large_as_a_float_can_hold_neither_overflow_nor_vanish(one_thread, monkeypatch):
    query, key, value, gradient = given(torch.float32, 1, 1, 16)
    inputs = (query * 1e9, key * 1e9, value, gradient)
    found = through(packed_attention_for(query, key, LAYOUTS), inputs, monkeypatch)
    assert found[0].isfinite().all()
    assert_near(found[:1], through(None, inputs, monkeypatch)[:1], 1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_number_of_threads(dtype, one_thread, monkeypatch):
    inputs = given(dtype, 4, 2, 32)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(through(packed_attention_for(inputs[0], inputs[1], LAYOUTS), inputs, monkeypatch))
    for other in found[1:]:
        assert all(one.equal(two) for one, two in zip(found[0], other, strict=True))


@needs_kernels
@pytest.mark.parametrize(
    "inputs, layouts",
    [
        ((torch.zeros(2, 9, 16, dtype=torch.float64),) * 2, (Layout(0, 5, (4,)),)),
        ((torch.zeros(2, 9, 24),) * 2, (Layout(0, 5, (4,)),)),
        ((torch.zeros(2, 9, 256),) * 2, (Layout(0, 4000, (1000,)),)),
    ],
    ids=["float64", "a width that is no multiple of 16", "more keys than a thread has room for"],
)
def test_what_the_kernels_are_not_made_for_is_left_to_pytorch(inputs, layouts, one_thread):
    assert packed_attention_for(*inputs, layouts) is None


@needs_kernels
def test_fewer_prompts_than_threads_are_left_to_pytorch_which_shares_out_queries_too(one_thread):
    query, layouts = torch.zeros(2, 9, 16), (Layout(0, 5, (4,)),)
    torch.set_num_threads(2)
    assert packed_attention_for(query, query, layouts) is not None
    torch.set_num_threads(3)
    assert packed_attention_for(query, query, layouts) is None


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_policy_learns_the_same_with_kernels_and_without(recomputes, one_thread, monkeypatch):
    model = tiny_model("qwen3", hidden=64, layers=2).eval()
    assert model.config.head_dim in range(16, 257, 16), "a width that the kernels are made for"
    model = checkpointing(model) if recomputes else model
    mine = gradients(Policy(model, pad_id=0), [ROWS])
    monkeypatch.setattr(shared_attention, "packed_attention_for", lambda *_: None)
    assert_same(gradients(Policy(model, pad_id=0), [ROWS]), mine)


def test_kernels_want_neither_masks_nor_places_of_tokens(one_thread, monkeypatch):
    policy = Policy(tiny_model(layers=2, hidden=64).train(), pad_id=0)
    assert policy.shares_prompts()
    for name in ("index", "valid", "mask"):
        monkeypatch.setattr(shared_prompt.Segment, name, property(lambda segment: pytest.fail("made for nobody")))
    assert policy.measure(ROWS).logp.requires_grad


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("COVEY_CPU_KERNELS", "0", "COVEY_CPU_KERNELS is 0"), ("CXX", "no-such-compiler", "there is no C++ compiler")],
)
def test_without_kernels_the_log_says_why(name, value, reason, one_thread, fresh, monkeypatch, caplog):
    monkeypatch.setenv(name, value)
    query = torch.zeros(2, 9, 16)
    with caplog.at_level(logging.INFO, "covey"):
        assert packed_attention_for(query, query, (Layout(0, 5, (4,)),)) is None
    assert f"Computing with PyTorch's own operations, not with compiled kernels: {reason}" in caplog.text


@needs_kernels
def test_kernels_that_compute_something_else_are_found_out(one_thread, fresh, monkeypatch, caplog):
    honest = PackedAttention.backward

    def wrong(self, *args):
        query, key, value = honest(self, *args)
        return query, key * 1.1, value

    monkeypatch.setattr(PackedAttention, "backward", wrong)
    query = torch.zeros(2, 9, 16)
    assert packed_attention_for(query, query, (Layout(0, 5, (4,)),)) is None
    assert "not with compiled kernels: attention differs by 0.1" in caplog.text


@needs_kernels
@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("flags", [["-mno-avx512bf16"], AVX2_ALONE])
def test_what_is_compiled_for_an_older_processor_is_the_same(dtype, slack, flags, one_thread, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = PackedAttention(ctypes.CDLL(str(compiled.built(SOURCE, (f"NUMBER={compiled.NUMBERS[dtype]}",), flags))))
    inputs = given(dtype, 2, 3, 80)
    exact = through(None, [x.double() for x in inputs], monkeypatch)
    assert_near(through(plain, inputs, monkeypatch), exact, slack)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_what_is_not_a_number_does_not_vanish(which, dtype, one_thread, monkeypatch):
    """The last token's query, key or value: its output is none either, nor are all gradients; other completions have theirs."""
    query, key, value, gradient = given(dtype, 1, 1, 16)
    {"query": query, "key": key, "value": value}[which][:, -1] = float("nan")
    out, *gradients = through(packed_attention_for(query, key, LAYOUTS), (query, key, value, gradient), monkeypatch)
    assert out[:, -1].isnan().all()
    assert out[:, :-2].isfinite().all()
    assert not all(one.isfinite().all() for one in gradients)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_stays_in_its_completion(dtype, one_thread, monkeypatch):
    """One thread takes all pieces one after another in the same room; every piece of the first prompt ends at another column."""
    query, key, value, gradient = given(dtype, 1, 1, 16)
    clean = through(packed_attention_for(query, key, LAYOUTS), (query, key, value, gradient), monkeypatch)
    for x in (query, key, value):
        x[:, 39:64] = float("nan")  # the longest completion of the first prompt, which comes last
    found = through(packed_attention_for(query, key, LAYOUTS), (query, key, value, gradient), monkeypatch)
    for one, two in zip(found, clean, strict=True):
        assert one[:, 39:64].isnan().any()
        assert torch.equal(one[:, 64:], two[:, 64:])
    for one, two in zip(found[:2], clean[:2], strict=True):
        assert torch.equal(one[:, :39], two[:, :39])


@needs_kernels
def test_memory_that_runs_out_is_an_error_which_the_learner_survives(one_thread, monkeypatch):
    inputs = given(torch.float32, 1, 1, 16)
    kernels = packed_attention_for(inputs[0], inputs[1], LAYOUTS)
    monkeypatch.setattr(kernels, "_scratch_size", lambda *_: 2**60)
    with pytest.raises(RuntimeError) as caught:
        through(kernels, inputs, monkeypatch)
    assert is_out_of_memory(caught.value)


@needs_kernels
def test_kernels_may_be_met_first_inside_a_forward_that_is_computed_again(one_thread, fresh):
    """What is computed to trust them is none of what that forward saves."""
    model = checkpointing(tiny_model("qwen3", hidden=64, layers=2).eval())
    policy = Policy(model, pad_id=0)
    policy._is_shared = True
    shared_prompt.install()
    model.config._attn_implementation = shared_prompt.ATTENTION
    _, found = gradients(policy, [ROWS])
    assert packed_attention._verified.cache_info().currsize == 1
    assert all(gradient.isfinite().all() for gradient in found.values())
