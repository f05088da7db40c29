"""Launches of a GPU for one layer and micro-batch of the learner, counted on a CPU, against a budget; weights cast once a step."""

import copy
import io
import pickle
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from launches import Launches, built
from peft import LoraConfig, get_peft_model

from covey.kernels import HalfWeights, LogitKernels, add_adapters_inside_products, fuse, half_weights
from covey.kernels import compile as compiled
from covey.kernels.flex_attention import SharedPromptAttention
from covey.learner import Policy
from covey.learner.lm_head import LinearLogProbability, LogitTransform
from covey.learner.packing import rows_of
from covey.learner.preparation import checkpoint_activations, short_pass
from covey.learner.vocabulary_blocks import by_vocabulary
from covey.learner.worst_case import groups_of
from covey.models import expert_weights
from kit import forgotten, rest_nightly, tiny_model

ROWS = rows_of(groups_of(8, 20, 16, 4, 300))
WITHOUT, PREPARED = 205, 60
"""Launches of a Qwen2 layer with recomputation, as PyTorch's operations under autocast and prepared for a GPU."""
SUMS = 12
"""Gradients of weights, biases and norms of a later micro-batch, each added to that of those before by one launch."""


@pytest.fixture(autouse=True)
def without_cpu_kernels(monkeypatch):
    """Layers as on a GPU: without the C++ kernels of a CPU."""
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    with forgotten(compiled.load):
        yield


A_LAYER = {
    "gemma3": (333, 103),
    "phi3": (178, 67),
    "glm4": (282, 88),
    "olmo2": (267, 97),
    "gpt_oss": (313, 173),
    "mixtral": (247, 142),
    "gemma2": (546, 351),
}
"""Launches of a layer in a later micro-batch, as written and prepared. Experts and capped scores, by operations of their own, take most of the last two."""


def prepared(arch, live, layers=3, dtype=torch.float32, checkpoints=True):
    """A policy whose layers are fused and whose weights are cast once, as on a GPU; kernels are counted in `live`."""
    model = built(arch, layers, dtype).train()
    if checkpoints:
        checkpoint_activations(model)
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16, shared_attention="sdpa")
    if live is not None:
        prepare(policy, live)
    policy.shares_prompts()
    return policy


def prepare(policy, live):
    fuse(policy.model, live.compiled, partial(short_pass, policy))
    policy.half = HalfWeights(policy.model, torch.bfloat16, (policy.output_layer(),))


def passes(policy, count=1):
    """Log-probabilities, and the gradients of all parameters by name."""
    with policy.weights_of_a_step():
        for _ in range(count):
            measured = policy.measure(ROWS, entropy=True)
            (measured.logp.sum() + 0.1 * measured.entropy.sum()).backward()
    return measured.logp.detach(), {
        name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None
    }


def a_layer(arch, is_prepared, monkeypatch):
    """Launches of one layer in the first micro-batch of a step and in a later one, by name."""
    counts = []
    for layers in (1, 3):
        live = Launches()
        policy = prepared(arch, live if is_prepared else None, layers)

        def attention(query, key, value):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

        def attend(query, key, value, layouts, mask, *, kernel, product, live=live):
            if product.softcap is not None:
                return None
            return live.counted(attention)(*(x.to(torch.bfloat16) for x in (query, key, value)))

        monkeypatch.setattr(SharedPromptAttention, "attend", staticmethod(attend))
        found = []
        with policy.weights_of_a_step():
            for _ in range(2):
                live.names.clear()
                with live:
                    policy.measure(ROWS, entropy=True).logp.sum().backward()
                found.append(Counter(live.names))
        counts.append(found)
    names = [{name: (three[name] - one[name]) / 2 for name in three} for one, three in zip(*counts, strict=True)]
    return [{name: count for name, count in found.items() if count} for found in names]


@pytest.mark.parametrize(
    "arch, budget", rest_nightly([("qwen2", PREPARED), ("llama", 57), ("qwen3", 73)], [("qwen3", 73)])
)
def test_a_layer_stays_within_its_budget_of_launches(arch, budget, monkeypatch):
    first, later = a_layer(arch, True, monkeypatch)
    assert (
        first["_to_copy.default"] == 9
    )  # seven gradients that a GPU's products write in float32, and those of two residuals
    on_gpu = lambda found: sum(found.values()) - 7
    assert on_gpu(first) <= budget
    assert on_gpu(later) - on_gpu(first) <= SUMS


@pytest.mark.parametrize("arch", rest_nightly(A_LAYER, ["gemma3", "glm4"]))
def test_a_layer_of_other_families_takes_a_third_of_the_launches_that_its_modules_take(arch, monkeypatch):
    plain, fused = (sum(a_layer(arch, is_prepared, monkeypatch)[1].values()) for is_prepared in (False, True))
    assert (plain, fused) == pytest.approx(A_LAYER[arch], abs=8)


@pytest.mark.nightly
def test_without_preparation_a_layer_takes_several_times_as_many(monkeypatch):
    _, later = a_layer("qwen2", False, monkeypatch)
    assert sum(later.values()) == pytest.approx(WITHOUT, abs=15)


@pytest.mark.parametrize(
    "arch, checkpoints",
    rest_nightly(
        product(
            ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3", "phi3", "glm4", "olmo2"),
            (False, True),
        ),
        [
            ("qwen2", True),
            ("qwen3", False),
            ("gemma3", True),
            ("phi3", False),
            ("glm4", False),
        ],
    ),
)
def test_values_and_gradients_are_those_of_transformers_layers_but_for_rounding(arch, checkpoints):
    plain, own = (passes(prepared(arch, live, checkpoints=checkpoints), 2) for live in (None, Launches()))
    exact = built(arch, 3).train()
    wide = passes(Policy(exact, pad_id=0), 2)
    distance = lambda found: (found[0] - wide[0]).abs().mean()
    assert distance(own) < 1.2 * distance(plain)
    for name, gradient in wide[1].items():
        off = lambda found, name=name, gradient=gradient: (found[1][name] - gradient).norm()
        assert own[1][name].dtype == torch.float32
        assert off(own) < 1.5 * off(plain) + 1e-3 * gradient.norm(), name


@pytest.mark.parametrize("arch, is_product_alone", [("gpt_oss", True), ("mixtral", False)])
def test_experts_read_norms_in_the_type_that_autocast_gives_them(arch, is_product_alone):
    """Some families add up outputs in float32, and then in the type of the input; GPT-OSS adds up in 16 bits."""
    plain, policy = (prepared(arch, live, 2, checkpoints=False) for live in (None, Launches()))
    before, after = (getattr(policy.model.model.layers[0], f"{at}_layernorm") for at in ("input", "post_attention"))
    assert (before.forward.args[2], after.forward.args[2]) == (True, is_product_alone)
    wide = Policy(built(arch, 2).train(), pad_id=0).measure(ROWS).logp
    own, autocast = ((passed.measure(ROWS).logp - wide).abs().mean() for passed in (policy, plain))
    assert own < 1.05 * autocast


def adapted(is_inside, layers, dtype=torch.bfloat16):
    """A LoRA policy prepared for a GPU, its adapters' products inside of their layers' or as PEFT's, and what counts its launches."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model("qwen2", layers=layers, hidden=64, dtype=dtype), config).train()
    checkpoint_activations(model)
    if is_inside:
        add_adapters_inside_products(model)
    live = Launches()
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16, shared_attention="sdpa")
    prepare(policy, live)
    policy.shares_prompts()
    return policy, live


@pytest.mark.nightly
def test_an_adapters_products_are_added_inside_of_those_of_its_layer():
    """PEFT casts the input of each of seven layers to float32 and back, and takes scale and sum of each output, there and back."""
    counts = []
    for is_inside in (False, True):
        of_layers = []
        for layers in (1, 2):
            policy, live = adapted(is_inside, layers)
            with policy.weights_of_a_step(), live:
                policy.measure(ROWS, entropy=True).logp.sum().backward()
            of_layers.append(live.names)
        one, two = of_layers
        counts.append({name: two[name] - one[name] for name in two})
    peft, inside = counts
    assert inside["mul.Tensor"] == peft["mul.Tensor"] - (7 + 6 + 7), "recomputation ends before the last layer's scale"
    assert inside["add.Tensor"] == peft["add.Tensor"] - (7 + 7 + 7)
    assert sum(inside.values()) < 0.8 * sum(peft.values())


def test_a_part_of_the_logits_takes_two_launches_forward_and_six_backward():
    """Product and statistics of some tokens; product, columns of the targets, gradient, two products and a sum of some words."""
    counts = []
    for chunk in (10, 20):  # eight and four parts of 80 tokens, ten and five of 1,280 words
        live = Launches()
        hidden, head = (torch.randn(count, 8).bfloat16().requires_grad_() for count in (80, 1280))
        shape = LogitTransform(1.0, None, 1.0, chunk, by_vocabulary=by_vocabulary, kernels=LogitKernels(live.compiled))
        with live:
            logp, _ = LinearLogProbability.apply(hidden, head, None, torch.arange(80), shape, True)
            forward = live.total
            logp.sum().backward()
        counts.append((forward, live.total - forward))
    (many, many_back), (few, few_back) = counts
    assert (many - few, many_back - few_back) == (4 * 2, 5 * 6)


@pytest.mark.parametrize("arch", rest_nightly(["qwen2", "gpt_oss", "mixtral"], ["gpt_oss"]))
def test_no_pass_casts_a_weight_of_a_linear_layer_or_of_experts(arch):
    live = Launches()
    policy = prepared(arch, live, 1)
    addresses = lambda layers: {x.data_ptr() for layer in layers for x in layer if x is not None}
    weights = addresses(map(policy.half.weights_of, policy.half.names))
    fused = addresses([[getattr(x, n) for n in expert_weights(x)] for x in policy.model.modules()])
    assert bool(fused) == (arch != "qwen2")
    assert fused <= weights
    with policy.weights_of_a_step(), live:
        for _ in range(2):
            policy.measure(ROWS, entropy=True).logp.sum().backward()
    assert live.casts
    assert not [dtype for address, dtype in live.casts if address in weights | addresses(policy.half.copies.values())]
    live.casts.clear()
    with live:
        policy.measure(ROWS, entropy=True).logp.sum().backward()
    assert {dtype for address, dtype in live.casts if address in weights} == {torch.bfloat16}, (
        "outside of a step each pass casts"
    )


def test_the_copy_is_read_inside_of_a_step_only_and_follows_the_weights():
    policy = prepared("qwen2", Launches())
    before = passes(policy)[0]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.data.mul_(1.5)  # as some optimizers write: without a new version of the tensor
    outside = policy.measure(ROWS).logp.detach()
    inside = passes(policy)[0]
    assert (inside - outside).abs().max() < 0.05 < (inside - before).abs().max()


def test_the_learner_writes_into_the_samplers_copy_where_there_is_one():
    policy = prepared("llama", Launches())
    attention = policy.model.model.layers[0].self_attn
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    merged = torch.zeros(sum(linear.out_features for linear in linears), 64, dtype=torch.bfloat16)
    for linear, part in zip(linears, merged.split([linear.out_features for linear in linears]), strict=True):
        half_weights.share_copy(linear, part, None)
    passes(policy)
    assert torch.equal(merged, torch.cat([linear.weight for linear in linears]).bfloat16())
    assert policy.half.copies[attention.k_proj][0].untyped_storage()._cdata == merged.untyped_storage()._cdata


def test_frozen_weights_get_no_gradient_and_adapters_compute_in_the_copy():
    peft = pytest.importorskip("peft")

    def gradients(is_prepared):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(tiny_model(layers=2, hidden=64), config).train()
        policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16, shared_attention="sdpa")
        if is_prepared:
            prepare(policy, Launches())
        return passes(policy)

    plain, own = gradients(False), gradients(True)
    assert own[1].keys() == plain[1].keys()
    assert all("lora" in name for name in own[1])
    assert (own[0] - plain[0]).abs().mean() < 5e-3
    for name, gradient in plain[1].items():
        assert (own[1][name] - gradient).norm() < 0.05 * gradient.norm() + 1e-4, name


def test_a_copy_of_a_prepared_model_computes_alone():
    policy = prepared("qwen2", None, checkpoints=False)
    fuse(policy.model)
    policy.half = HalfWeights(policy.model, torch.bfloat16)
    other = copy.deepcopy(policy.model)
    assert other.model.layers[0].mlp.forward.args[0] is other.model.layers[0].mlp
    assert other.model.layers[0].mlp.up_proj.forward.args[0] is other.model.layers[0].mlp.up_proj
    assert not other.model.layers[0].mlp.up_proj.forward.args[1].names
    read = pickle.loads(pickle.dumps(policy.model))
    assert read.model.layers[1].input_layernorm.forward.args[0] is read.model.layers[1].input_layernorm
    torch.save(policy.model.state_dict(), io.BytesIO())


def test_modules_with_another_formula_are_left_as_they_are():
    assert fuse(tiny_model("gpt2", layers=1)) == 0
    assert fuse(tiny_model("gemma2", layers=1)) == 5  # norms, whose weights count from 1, and a gated MLP of GELU

    class NearGelu(torch.nn.Module):
        def forward(self, x):
            return F.gelu(x, approximate="tanh") + 2e-4 * x

    for activation in (torch.nn.ReLU(), NearGelu()):
        model = tiny_model("llama", layers=1)
        model.model.layers[0].mlp.act_fn = activation
        assert fuse(model) == 2  # its norms
