"""Layers whose norms and gates run in kernels on a CPU: transformers' own numbers and gradients, with less kept."""

import copy
import pickle
from contextlib import contextmanager, nullcontext

import pytest
import torch
from shared_rows import ROWS, assert_same, checkpointing, gradients

from covey.kernels import compile as compiled
from covey.kernels import fused_model as fused_layers
from covey.kernels import fused_ops as layers
from covey.kernels.fused_model import FusedLayers, fused, learning, would_fuse
from covey.learner import Policy
from covey.learner.preparation import checkpoint_activations
from kit import forgotten, rest_nightly, threads, tiny_model

REASON = compiled.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

WIDE = {"layers": 2, "hidden": 64}
"""Widths that the kernels take."""
FAMILY = ["qwen2", "llama", "mistral", "qwen3"]
ALL = {"norm", "norm_backward", "gate", "gate_backward"}
TYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
"""Of the residual stream and of the products."""


def policy_of(model, dtype=None):
    """A policy that knows already whether its prompts can be shared."""
    policy = Policy(model, pad_id=0, compute_dtype=dtype)
    policy.shares_prompts()
    return policy


@pytest.fixture
def unfused(monkeypatch):
    """A context in which a policy's layers are transformers' own."""

    @contextmanager
    def inside():
        with monkeypatch.context() as patch:
            patch.setattr(fused_layers, "fused", lambda model: nullcontext())
            yield

    return inside


def computed_by_kernels(monkeypatch):
    """The names of the kernels that are called from now on."""
    seen = set()
    for types in TYPES:
        layers.layer_kernels(*types)  # which calls each the first time
    for name in ALL:
        original = getattr(layers.LayerKernels, name)

        def watched(self, *args, _name=name, _original=original, **kwargs):
            seen.add(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(layers.LayerKernels, name, watched)
    return seen


@pytest.mark.parametrize("arch", rest_nightly(FAMILY, ["qwen3", "llama"]))
@pytest.mark.parametrize("alone", [False, True], ids=["packed rows", "padded rows"])
def test_values_and_gradients_are_those_of_transformers_layers(arch, alone, unfused, monkeypatch):
    policy = policy_of(tiny_model(arch, **WIDE))
    batches = [[row] for row in ROWS] if alone else [ROWS]
    with unfused():
        expected = gradients(policy, batches)
    seen = computed_by_kernels(monkeypatch)
    assert_same(gradients(policy, batches), expected)
    assert seen == ALL


def test_in_bfloat16_they_are_as_near_to_float32s_as_transformers_layers(unfused):
    model = tiny_model(**WIDE)
    exact = gradients(policy_of(model), [ROWS])[1]
    far = lambda found: torch.stack([(found[name] - exact[name]).norm() / exact[name].norm() for name in exact]).mean()
    narrow = policy_of(model, torch.bfloat16)
    with unfused():
        plain = far(gradients(narrow, [ROWS])[1])
    assert 0 < far(gradients(narrow, [ROWS])[1]) < 1.3 * plain


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_activations_that_are_computed_again_give_the_same_gradient(dtype):
    model = tiny_model(**WIDE)
    expected = gradients(policy_of(model.train(), dtype), [ROWS])
    checkpoint_activations(model)
    policy = policy_of(model, dtype)
    assert policy.is_checkpointing
    assert_same(gradients(policy, [ROWS]), expected)


def test_checkpointing_that_somebody_else_switched_on_is_left_unfused(monkeypatch):
    policy = policy_of(checkpointing(tiny_model(**WIDE)))
    seen = computed_by_kernels(monkeypatch)
    gradients(policy, [ROWS])
    assert not seen, "what is computed again outside of the context would be saved otherwise"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_adapter_gets_its_own_gradients_and_the_frozen_weights_none(dtype, unfused, monkeypatch):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    policy = policy_of(peft.get_peft_model(tiny_model(**WIDE), config), dtype)
    with unfused():
        expected = gradients(policy, [ROWS])
    seen = computed_by_kernels(monkeypatch)
    found = gradients(policy, [ROWS])
    assert {"norm", "gate"} <= seen
    assert found[1].keys() == expected[1].keys()
    assert all("lora" in name for name in found[1])
    if dtype is None:
        assert_same(found, expected)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() < 0.05 * gradient.norm() + 1e-4, name


def test_it_keeps_a_quarter_less_for_the_backward(unfused):
    policy = policy_of(tiny_model(**WIDE), torch.bfloat16)

    def kept():
        own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
        found = {}
        note = lambda x: found.setdefault(x.untyped_storage().data_ptr(), x)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            policy.measure(ROWS)
        return sum(x.untyped_storage().nbytes() for place, x in found.items() if place not in own and x.ndim > 2)

    with unfused():
        plain = kept()
    assert kept() < 0.75 * plain


@pytest.mark.parametrize("arch", rest_nightly(["gemma2", "gpt2"], ["gpt2"]))
def test_layers_that_compute_something_else_are_left_as_they_are(arch, unfused, monkeypatch):
    model = tiny_model(arch, **WIDE)
    policy = policy_of(model)
    with unfused():
        expected = gradients(policy, [[row] for row in ROWS])
    seen = computed_by_kernels(monkeypatch)
    assert_same(gradients(policy, [[row] for row in ROWS]), expected)
    assert not seen
    assert not would_fuse(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_a_gate_with_another_activation_is_its_own(activation, dtype, monkeypatch):
    model = tiny_model("llama", **WIDE, hidden_act=activation, dtype=dtype)
    seen = computed_by_kernels(monkeypatch)
    with fused(model), torch.no_grad():
        model(torch.arange(6)[None])
    assert seen == {"norm"}
    assert not would_fuse(model)


def test_a_gate_whose_output_is_zero_tells_nothing_and_is_left_alone(monkeypatch):
    model = tiny_model(**WIDE)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    seen = computed_by_kernels(monkeypatch)
    with fused(model), torch.no_grad():
        model(torch.arange(6)[None])
    assert "gate" not in seen


def test_a_gate_that_names_no_activation_is_left_alone(monkeypatch):
    model = tiny_model(**WIDE)
    for layer in model.model.layers:
        del layer.mlp.act_fn
    silu = torch.nn.functional.silu
    gated = lambda self, x: self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", gated)
    seen = computed_by_kernels(monkeypatch)
    with fused(model), torch.no_grad():
        model(torch.arange(6)[None])
    assert seen == {"norm"}


def test_what_somebody_else_hooked_in_or_put_there_is_called(monkeypatch):
    model = tiny_model(**WIDE)
    first, second = (layer.mlp for layer in model.model.layers)
    norm, other = model.model.layers[0].input_layernorm, model.model.layers[1].post_attention_layernorm
    called = []
    with fused(model):
        pass
    first.act_fn.register_forward_hook(lambda *_: called.append("activation"))
    original = second.down_proj.forward
    second.down_proj.forward = lambda x: called.append("down") or original(x)
    norm.forward = lambda x: called.append("norm") or type(norm).forward(norm, x)
    other.forward = lambda x: called.append("other norm") or type(other).forward(other, x)
    with fused(model), torch.no_grad():
        model(torch.arange(6)[None])
    assert sorted(called) == ["activation", "down", "norm", "other norm"]
    assert "forward" in norm.__dict__


def test_a_layer_without_weights_in_its_norm_is_no_error():
    from transformers import OlmoConfig, OlmoForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = OlmoForCausalLM(OlmoConfig(vocab_size=64, pad_token_id=0, eos_token_id=0, **sizes))
    assert not would_fuse(model)
    with torch.no_grad():
        expected = model(torch.arange(6)[None]).logits
        with fused(model):
            torch.testing.assert_close(model(torch.arange(6)[None]).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_graph_whose_activations_are_computed_again_may_be_gone_through_twice():
    model = tiny_model(**WIDE).train()
    checkpoint_activations(model)
    measured = policy_of(model).measure(ROWS)
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    once = torch.autograd.grad(measured.logp.sum(), weights, retain_graph=True)
    for one, two in zip(once, torch.autograd.grad(measured.logp.sum(), weights), strict=True):
        assert torch.equal(one, two)


def test_blocks_recomputed_by_means_that_are_not_known_are_left_unfused():
    model = tiny_model(**WIDE).train()
    model.model.gradient_checkpointing = True  # as models of an older kind say it, with a function of their own
    assert isinstance(learning(model), nullcontext)


def test_a_norm_or_a_gate_with_another_formula_is_not_taken_for_the_known_one(monkeypatch):
    model = tiny_model("llama", **WIDE)
    first, second = model.model.layers
    monkeypatch.setattr(
        type(first.mlp), "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))
    )
    first.input_layernorm.__class__ = type(
        "Shifted", (type(first.input_layernorm),), {"forward": lambda self, x: x + 1}
    )
    seen = computed_by_kernels(monkeypatch)
    with fused(model), torch.no_grad():
        assert "forward" not in first.input_layernorm.__dict__
        assert "forward" in second.input_layernorm.__dict__
        model(torch.arange(6)[None])
    assert seen == {"norm"}


def test_a_hook_on_a_norm_between_two_sums_is_called():
    policy = policy_of(tiny_model(**WIDE))
    expected, heard = gradients(policy, [ROWS]), []
    for layer in policy.model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(lambda *given: heard.append(given[2].shape))
    assert_same(gradients(policy, [ROWS]), expected)
    assert len(heard) == len(policy.model.model.layers)


def test_outside_of_the_context_nothing_of_the_model_is_changed():
    model = tiny_model(**WIDE)

    def fails():
        with fused(model), fused(model):
            assert any("forward" in module.__dict__ for module in model.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_copy_of_the_model_computes_by_its_own_weights():
    model = tiny_model(**WIDE)
    with fused(model):
        pass
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
            alone = other(torch.arange(6)[None]).logits
            with fused(other):
                inside = other(torch.arange(6)[None]).logits
        torch.testing.assert_close(inside, alone, rtol=1e-4, atol=1e-5)


def test_recognising_draws_no_random_number_of_the_run():
    model = tiny_model(**WIDE)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with fused(model):
        pass
    assert torch.equal(torch.rand(2), expected)


def test_switched_off_or_in_float64_there_is_no_context(monkeypatch):
    assert isinstance(fused(tiny_model(**WIDE)), FusedLayers)
    assert isinstance(fused(tiny_model(**WIDE).double()), nullcontext)
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    with forgotten(layers._verified, compiled.load):
        assert isinstance(fused(tiny_model(**WIDE)), nullcontext)
        assert not would_fuse(tiny_model(**WIDE))


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 700])
def test_the_kernels_give_the_formulas_values_and_gradients(types, rows):
    kernels = layers.layer_kernels(*types)
    stream, products = types
    torch.manual_seed(0)
    slack = {"rtol": 1e-4, "atol": 1e-4} if products == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    x = torch.randn(rows, 48).to(stream).float().requires_grad_()
    weight = torch.randn(48, requires_grad=True)
    gate, up = (torch.randn(rows, 48).mul(3).to(products).float().requires_grad_() for _ in range(2))
    slope = torch.randn(rows, 48).to(products)

    normed = torch.nn.functional.rms_norm(x, (48,), weight, 1e-5)
    out, scales = kernels.norm(x.detach().to(stream), weight.detach(), 1e-5, products)
    torch.testing.assert_close(out.float(), normed, **slack)
    expected = torch.autograd.grad(normed, [x, weight], slope.float())
    found = kernels.norm_backward(slope, x.detach().to(stream), weight.detach(), scales)
    torch.testing.assert_close(found[0].float(), expected[0], **slack)
    assert (found[1] - expected[1]).norm() < slack["rtol"] * expected[1].norm()

    gated = torch.nn.functional.silu(gate) * up
    given = gate.detach().to(products), up.detach().to(products)
    torch.testing.assert_close(kernels.gate(*given).float(), gated, **slack)
    again = slope.clone()
    found = kernels.gate_backward(again, *given, repeats=True)
    for one, two in zip(found, torch.autograd.grad(gated, [gate, up], slope.float()), strict=True):
        torch.testing.assert_close(one.float(), two, **slack)
    torch.testing.assert_close(again.float(), gated, **slack)


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_the_kernels_results_do_not_depend_on_the_number_of_threads(types):
    stream, products = types
    kernels, generator = layers.layer_kernels(stream, products), torch.Generator().manual_seed(0)
    make = lambda *shape, dtype=products: torch.randn(*shape, generator=generator).to(dtype)
    x, weight, gradient = make(700, 64, dtype=stream), make(64, dtype=torch.float32), make(700, 64)
    gate, up = make(700, 64), make(700, 64)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            out, scales = kernels.norm(x, weight, 1e-6, products)
            back, sums = kernels.norm_backward(gradient, x, weight, scales)
            gated = kernels.gate(gate, up), *kernels.gate_backward(gradient, gate, up)
            found.append(([out, scales, back, *gated], sums))
    terms = gradient.double() * x.double() * found[0][0][1].double()[:, None]
    rounding = 2**-22 * terms.abs().sum(0)  # of a term and of the sum; a row left out is 0.1
    for same, sums in found:
        assert all(one.equal(two) for one, two in zip(found[0][0], same, strict=True))
        assert ((sums - terms.sum(0)).abs() <= rounding).all()  # each thread adds its own rows, in an order of its own


def test_what_is_not_finite_stays_so():
    kernels = layers.layer_kernels(torch.float32, torch.float32)
    broken = torch.ones(2, 16)
    broken[0, 3] = float("nan")
    assert kernels.norm(broken, torch.ones(16), 1e-6, torch.float32)[0][0].isnan().all()
    assert kernels.gate(broken, torch.ones(2, 16))[0, 3].isnan()
    assert kernels.gate(torch.ones(2, 16), broken)[0, 3].isnan()
    assert kernels.gate(torch.full((1, 16), -200.0), torch.ones(1, 16)).abs().max() < 1e-30
    assert kernels.gate(torch.full((1, 16), 200.0), torch.ones(1, 16)).eq(200).all()
