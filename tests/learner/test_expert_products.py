"""Fused experts of float32 models under autocast: 16-bit products, the sampler's numbers, and gradients in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covey.kernels import HalfWeights
from covey.kernels.half_weights import share_copy
from covey.learner.out_of_memory import offloaded
from covey.learner.policy import Policy
from covey.models import expert_weights, settle_products
from covey.rollout.autocast import AutocastForward
from expert_models import FAMILIES, LATENT, expert_model, with_adapted_experts
from kit import rest_nightly

OPTIONS: dict[str, dict[str, Any]] = {
    **{family: {} for family in (*FAMILIES, "Glm4Moe", "Mixtral", "Phimoe", "Olmoe", "Qwen2Moe", "HunYuanMoEV1")},
    **{family: {} for family in ("Dots1", "FlexOlmo", "Afmoe")},
    "GraniteMoeShared": {"shared_intermediate_size": 16},
    "NemotronH": {},
    "DeepseekV2": {**LATENT, "n_group": 1, "topk_group": 1},
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 2},
    "Qwen3_5MoeText": {
        **{
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        **{"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16},
    },
}
BF16 = torch.bfloat16
PRODUCTS = ("_grouped_mm", "mm", "addmm", "bmm", "matmul", "linear")
families = pytest.mark.parametrize("family", rest_nightly(OPTIONS, ["Mixtral", "GptOss"]))
with_adapter = pytest.mark.parametrize("is_adapted", [False, True], ids=["plain", "adapted"])


def built(family: str, is_adapted: bool, implementation: str = "grouped_mm") -> Any:
    model = expert_model(family, **OPTIONS[family])
    model.set_experts_implementation(implementation)
    return with_adapted_experts(model) if is_adapted else model


def experts_in(model: Any) -> list[Any]:
    """The experts of each layer as they are called: inside of PEFT's layers, if they have any."""
    called: dict[int, Any] = {}
    for module in model.modules():
        inner = module.get_base_layer() if hasattr(module, "parameter_name") else module
        if expert_weights(inner):
            called.setdefault(id(inner), module)
    return list(called.values())


def tokens(experts: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden states [40, D] of 40 tokens, two experts of each [40, 2], and their weights [40, 2]."""
    draw = torch.Generator().manual_seed(1)
    inner = experts.get_base_layer() if hasattr(experts, "parameter_name") else experts
    width = inner.down_proj.shape[2 if inner.is_transposed else 1]
    chosen = torch.rand(40, 8, generator=draw).topk(2).indices
    return torch.randn(40, width, generator=draw).to(dtype), chosen, torch.rand(40, 2, generator=draw).to(dtype)


class Products(TorchDispatchMode):
    """Mode that collects the types of the operands of products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        self.names.add(name)
        if name in PRODUCTS:
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
        return function(*args, **(kwargs or {}))


@families
@with_adapter
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_sampler_and_learner_compute_the_same_bits_in_16_bit_products(family, is_adapted, implementation):
    model = built(family, is_adapted, implementation)
    sampler, policy = AutocastForward(model, BF16), Policy(model, pad_id=0, compute_dtype=BF16)
    pairs = list(zip(experts_in(model), experts_in(sampler.model), strict=True))
    assert pairs
    for learnt, drawn in pairs:
        seen = Products(), Products()
        with torch.no_grad(), policy.autocast(), seen[0]:
            mine = learnt(*tokens(learnt))
        with torch.no_grad(), sampler._autocast(), seen[1]:
            theirs = drawn(*tokens(learnt))
        assert torch.equal(mine, theirs)
        assert seen[0].dtypes == seen[1].dtypes == {BF16}
        assert not {"baddbmm", "_to_copy"} & (seen[1].names - seen[0].names)
        assert "baddbmm" not in seen[1].names, "adapters are merged once a load"


def gradients(model: Any, dtype: torch.dtype, is_cast: bool) -> list[list[torch.Tensor]]:
    """By layer: output, and gradients of the input, of the experts' weights that are trained, and of the routers' weights."""
    found = []
    for experts in experts_in(model):
        x, chosen, weights = tokens(experts, dtype)
        trained = [p for p in experts.parameters() if p.requires_grad]
        leaves = [x.requires_grad_(), weights.requires_grad_(), *trained]
        with torch.autocast("cpu", BF16, enabled=is_cast):
            out = experts(x, chosen, weights)
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        found.append([out.detach(), *torch.autograd.grad((out * slope).sum(), leaves)])
    return found


@families
@with_adapter
def test_gradients_are_as_near_float64_as_those_of_autocast_expert_by_expert(family, is_adapted):
    exact = gradients(built(family, is_adapted, "eager").double(), torch.float64, is_cast=False)
    grouped = built(family, is_adapted)
    settle_products(grouped)
    mine, eager = (
        gradients(grouped, torch.float32, True),
        gradients(built(family, is_adapted, "eager"), torch.float32, True),
    )
    rounding = 2**-8 if family == "GptOss" else 0  # of a grouped product to which a bias is added
    for wide, own, other in zip(exact, mine, eager, strict=True):
        for place, (reference, a, b) in enumerate(zip(wide, own, other, strict=True)):
            assert a.dtype == torch.float32
            off = lambda x, reference=reference: float((x.double() - reference).norm() / reference.norm())
            assert 0 < off(a) < 1.02 * off(b) + rounding, place


@pytest.mark.parametrize("family", rest_nightly(["GptOss", "Mixtral"], 1))
def test_inside_of_a_step_experts_read_one_copy_with_the_same_numbers(family):
    plain = built(family, False)
    settle_products(plain)
    model = copy.deepcopy(plain)
    half = HalfWeights(model, BF16)
    assert set(experts_in(model)) <= half.names.keys()
    expected = gradients(plain, torch.float32, True)
    with half.fresh():
        own = gradients(model, torch.float32, True)
        for experts in experts_in(model):
            addresses = {weight.data_ptr() for weight in half.copies[experts]}
            read = set[int]()
            note = lambda x, read=read: read.add(x.data_ptr()) or x
            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), torch.autocast("cpu", BF16):
                x, *others = tokens(experts)
                experts(x.requires_grad_(), *others)
            assert len(addresses & read) == 2, "gate and up, and down"
    for mine, other in zip(own, expected, strict=True):
        assert all(map(torch.equal, mine, other))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert not torch.equal(gradients(model, torch.float32, True)[0][0], expected[0][0]), (
        "outside it follows the weights"
    )


def test_copies_of_experts_stay_where_they_are_when_activations_are_offloaded():
    model = built("Mixtral", False)
    settle_products(model)
    half = HalfWeights(model, BF16)
    experts = experts_in(model)[0]
    moved: list[int] = []
    empty = torch.empty_strided
    largest = 40 * 2 * 2 * 48
    with half.fresh(), pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", BF16):
        patch.setattr(torch, "empty_strided", lambda size, *a, **k: moved.append(size.numel()) or empty(size, *a, **k))
        with offloaded(pins=False):
            experts(*(x.requires_grad_() if x.is_floating_point() else x for x in tokens(experts)))
    assert moved
    assert max(moved) <= largest < experts.gate_up_proj.numel()


def test_the_learner_casts_experts_into_the_samplers_memory_where_there_is_one():
    model = built("Mixtral", False)
    sampler = AutocastForward(model, BF16)
    for live, mine in zip(experts_in(model), experts_in(sampler.model), strict=True):
        share_copy(live, *(getattr(mine, name) for name in expert_weights(live)))
    half = HalfWeights(model, BF16)
    half.refresh()
    for live, mine in zip(experts_in(model), experts_in(sampler.model), strict=True):
        assert half.copies[live][0].data_ptr() == mine.gate_up_proj.data_ptr()


def test_adapted_experts_have_no_copy_of_their_own():
    assert not any(expert_weights(layer) for layer in HalfWeights(built("Mixtral", True), BF16).names)


def test_the_samplers_merged_experts_follow_the_adapter():
    model = built("Mixtral", True)
    forward = AutocastForward(model, BF16)
    layer = experts_in(model)[0]
    mine = experts_in(forward.model)[0]
    before = mine.down_proj.clone()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(-2)
    assert forward.refresh()
    assert not torch.equal(mine.down_proj, before)
    with torch.no_grad(), layer._activate_lora(layer.active_adapters):
        expected = getattr(layer.get_base_layer(), layer.parameter_name).to(BF16)
    assert torch.equal(getattr(mine, layer.parameter_name), expected)
    model.base_model.disable_adapter_layers()
    assert forward.refresh()
    assert torch.equal(mine.down_proj, layer.get_base_layer().down_proj.to(BF16)), "the adapter is off"


def test_float32_experts_without_autocast_compute_as_the_model_is_written():
    model = built("GptOss", False)
    plain = gradients(model, torch.float32, False)
    settle_products(model)
    for own, other in zip(gradients(model, torch.float32, False), plain, strict=True):
        assert all(map(torch.equal, own, other))
