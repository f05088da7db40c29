"""Each form of a formula that a model really uses is tried once, forward and backward; a wrong kernel reaches no pass."""

import sys
from functools import partial

import pytest
import torch
from launches import built

from covey.kernels import compile as compiled
from covey.kernels import fuse, fused_layers
from covey.kernels.fused_layers import computed, sampling
from covey.kernels.gates import gated, gated_halves
from covey.kernels.norms import rms_norm
from covey.kernels.rotations import ROTATION, rotated, without_rotation
from covey.learner import Policy
from covey.learner.packing import rows_of
from covey.learner.preparation import checkpoint_activations, short_pass
from covey.learner.worst_case import groups_of
from kit import forgotten, rest_nightly

ROWS = rows_of(groups_of(6, 10, 8, 3, 300))
BACKWARD = fused_layers._BACKWARD


@pytest.fixture(autouse=True)
def without_cpu_kernels(monkeypatch):
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    with forgotten(compiled.load):
        yield
    for home in [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]:
        if (function := vars(home).get(ROTATION)) is not None:
            vars(home)[ROTATION] = without_rotation(function, fused_layers._rotation)


FORMS = {
    "norm": ("qwen2", {}, rms_norm, "1e-06, torch.bfloat16, 0.0"),
    "norm of heads": ("qwen3", {}, rms_norm, "bfloat16 [32], float32 [32] "),
    "norm that counts from 1": ("gemma3", {}, rms_norm, "torch.bfloat16, 1.0"),
    "SiLU": ("qwen2", {}, gated, "('silu',)"),
    "GELU": ("llama", {"hidden_act": "gelu"}, gated, "('none',)"),
    "tanh-GELU": ("gemma3", {}, gated, "('tanh',)"),
    "gate and up in one product": ("phi3", {}, gated_halves, "('silu',)"),
    "rotation by halves": ("qwen2", {}, rotated, "(torch.bfloat16, False, False)"),
    "rotation of half a head": ("phi3", {}, rotated, "float32 [16], float32 [16] (torch.bfloat16, False, False)"),
    "rotation of neighbours": ("glm4", {}, rotated, "(torch.bfloat16, True, True)"),
    "rotation by pair": ("gpt_oss", {}, rotated, "(torch.bfloat16, False, True)"),
}  # fmt: skip


def wrong(formula):
    """A compiler whose kernel of `formula` has a last column that is five times too large, and right elsewhere."""

    def compile_it(function):
        def run(*args):
            out = function(*args)
            first = out[0].clone() if isinstance(out, tuple) else out.clone()
            first[..., -1] *= 5
            return (first, *out[1:]) if isinstance(out, tuple) else first

        return run if function is formula else function

    return compile_it


def policy_of(arch, options):
    model = built(arch, 1, **options).train()
    return Policy(model, pad_id=0, compute_dtype=torch.bfloat16, shared_attention="sdpa")


def passed(policy):
    policy.model.zero_grad()
    measured = policy.measure(ROWS)
    measured.logp.sum().backward()
    return measured.logp.detach(), *(p.grad.clone() for p in policy.model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "form, is_backward",
    rest_nightly(
        [(form, back) for form in FORMS for back in (False, True)], [(f, False) for f in FORMS] + [("SiLU", True)]
    ),
)
def test_a_wrong_kernel_of_any_form_is_left_to_pytorch_and_named_once(form, is_backward, caplog):
    arch, options, formula, name = FORMS[form]
    policy = policy_of(arch, options)
    want = passed(policy)
    fuse(policy.model, wrong(BACKWARD[formula] if is_backward else formula), partial(short_pass, policy))
    records = [r.getMessage() for r in caplog.records if "computed by PyTorch's operations" in r.getMessage()]
    assert records
    assert all(
        text.startswith(f"{formula.__name__} of ") and "its kernel differs from them by" in text for text in records
    )
    assert any(name in text for text in records), records
    assert len(set(records)) == len(records)
    got = passed(policy)
    assert records == [r.getMessage() for r in caplog.records if "computed by PyTorch's operations" in r.getMessage()]
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).norm() <= 0.1 * theirs.norm() + 1e-6


@pytest.mark.parametrize("slope", [torch.float32, torch.bfloat16])
def test_a_kernel_that_rounds_once_more_passes_and_one_that_loses_a_row_does_not(slope, caplog):
    x, weight = torch.randn(8, 64, dtype=slope), torch.randn(64)
    rest = 1e-6, torch.bfloat16, 0.0
    rounded = lambda x, weight, epsilon, dtype, offset: rms_norm(x, None, epsilon, dtype) * weight.to(dtype)
    twice = lambda function: rounded if function is rms_norm else function
    assert computed(rms_norm, twice, (x, weight), rest) is not None

    def losing(function):
        def run(*args):
            out = function(*args)
            if function is rms_norm:
                out[-1] = 0  # as a mask that ends a row too early
            return out

        return run

    assert computed(rms_norm, losing, (x, weight), rest) is None
    assert "differs from them by 0.0" in caplog.text


def test_a_kernel_whose_last_gradient_is_not_finite_is_left_to_pytorch():
    def broken(function):
        with_nan = lambda *args: (function(*args)[0], function(*args)[1] * torch.nan)
        return with_nan if function is BACKWARD[rms_norm] else function

    form = (torch.randn(8, 64), torch.randn(64)), (1e-6, torch.float32, 0.0)
    assert fused_layers.tried(rms_norm, broken, *form) == "differs from them by nan"


def test_a_compiler_that_fails_for_a_form_is_named_and_leaves_its_module():
    def failing(function):
        raise RuntimeError("no nvcc here\nmore")

    x = torch.randn(8, 64)
    assert computed(gated, failing, (x, x), ("silu",)) is None
    assert (
        fused_layers.tried(gated, failing, (x, x), ("silu",))
        == "does not compile or run here (RuntimeError: no nvcc here)"
    )

    def full(function):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        computed(gated, full, (x, x), ("silu",))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_form_that_is_first_met_in_a_pass_with_gradients_is_tried_beside_it(checkpoints):
    """Its trial saves no tensor of the pass, which recomputation would miss."""
    policy = policy_of("qwen3", {})
    if checkpoints:
        checkpoint_activations(policy.model)
    fuse(policy.model, wrong(gated))
    policy.shares_prompts()
    for form in list(fused_layers._agreed):
        fused_layers._agreed.pop(form)
    want = passed(policy)
    for mine, theirs in zip(passed(policy), want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_samplers_passes_compute_by_the_modules():
    """A step is eager once and then captured; both round alike, so a completion does not depend on what was captured before."""
    policy = policy_of("gemma3", {})
    ids = torch.arange(6)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = policy.model(ids).logits
        fuse(policy.model, lambda function: function)
        fused = policy.model(ids).logits
        with sampling():
            assert torch.equal(policy.model(ids).logits, plain)
    assert not torch.equal(fused, plain)
