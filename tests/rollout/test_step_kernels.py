"""Norms and rotations of a model's own modules in the sampler's kernels, each as its PyTorch twin."""

import dataclasses
import functools
import importlib
import threading

import pytest
import torch
from families import FAMILIES
from kernel_twins import Launches, with_twins
from plain_sampling import collect, ids_of
from static_runs import PROMPTS, logprobs_of

from covey.kernels import TritonDecode, fuse, step_kernels
from covey.kernels.rotations import KINDS, replace_rotations, rotated
from covey.kernels.step_kernels import StepKernels
from covey.rollout import NativeSampler, SamplingParams
from kit import rest_nightly, tiny_tokenizer

A_LAYER = {
    "Phi-4": 14, "Gemma 3": 21, "Qwen3-MoE": 35, "GLM-4": 18, "OLMo 2": 24, "SmolLM3": 16.5, "Granite 3": 19,
    "Gemma 4": 30, "LFM2": 17.5, "gpt-oss": 40,
}  # fmt: skip
"""Launches of a layer and decode step with bfloat16 weights; as written they take 39 to 103."""


def built(name, repeats=1):
    """A family with few embeddings and its pattern of layers `repeats` times; its model and number of layers."""
    family = FAMILIES[name]
    options = dict(family.options)
    layers = repeats * options.get("num_hidden_layers", 2)
    if "layer_types" in options:
        options["layer_types"] = options["layer_types"] * repeats
    family = dataclasses.replace(family, options={**options, "num_hidden_layers": layers}, vocabulary=512)
    return family.build(), layers


def launches_of_a_step(monkeypatch, name, repeats):
    launches, (model, layers) = Launches(), built(name, repeats)
    with_twins(monkeypatch, launches)
    sampler = NativeSampler(model.to(torch.bfloat16), tiny_tokenizer(), attention="triton")
    sampler.forward.steps = []  # of a CPU, in place
    scheduler = sampler.begin(PROMPTS[:2], 4, SamplingParams(max_tokens=9, seed=1))
    with sampler.forward.evaluating():
        scheduler._admit()
        scheduler.cache.reserve(1)
        launches.total = 0
        with launches:
            scheduler._one(scheduler.cache.num_computed)
    return launches.total, layers


@pytest.mark.parametrize("name", rest_nightly(A_LAYER, ("Phi-4", "Gemma 3")))
def test_a_layer_takes_a_third_of_the_launches_that_its_modules_take(monkeypatch, name):
    (few, layers), (more, twice) = (launches_of_a_step(monkeypatch, name, repeats) for repeats in (1, 2))
    assert (more - few) / (twice - layers) <= A_LAYER[name]


@pytest.mark.parametrize(
    "name", rest_nightly([*A_LAYER, "gpt-oss", "Qwen3.5", "Falcon-H1"], ("GLM-4", "Gemma 3", "Qwen3.5"))
)
def test_the_completions_are_those_of_the_modules(monkeypatch, name):
    model, params = built(name)[0], SamplingParams(max_tokens=12, seed=7)
    expected = collect(NativeSampler(model, tiny_tokenizer(), dtype="float32"), PROMPTS[:3], 2, params)
    with_twins(monkeypatch)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", attention="triton")
    assert sampler.forward.in_kernels.count > 3
    groups = collect(sampler, PROMPTS[:3], 2, params)
    assert ids_of(groups) == ids_of(expected)
    torch.testing.assert_close(logprobs_of(groups), logprobs_of(expected), atol=2e-5, rtol=0)


def kernels_of(model):
    ids = torch.arange(4)[None]

    def run():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids).logits

    with torch.autocast("cpu", torch.bfloat16):
        return StepKernels(model, run)


@pytest.mark.parametrize(
    "name, roles",
    [
        ("Phi-4", {"layers.input_layernorm", "layers.post_attention_layernorm", "norm"}),
        ("Qwen3-MoE", {"layers.input_layernorm", "norm"}),  # experts with float32 weights compute in float32
    ],
)
def test_a_norm_is_rounded_for_products_where_products_alone_read_it(name, roles):
    model, _ = built(name)
    feeding = kernels_of(model).feeding
    names = {name for name, module in model.model.named_modules() if module in feeding}
    heads = {name for name in names if name.endswith(("q_norm", "k_norm"))}  # 16 bits already, as products return them
    assert {".".join(part for part in name.split(".") if not part.isdigit()) for name in names - heads} == roles


def test_a_norm_with_one_reader_in_float32_is_not_rounded():
    model, _ = built("Phi-4")
    norm = model.model.layers[0].post_attention_layernorm
    assert norm in kernels_of(model).feeding

    class Wide(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp(x) + 1e-3 * x.float()

    model.model.layers[0].mlp = Wide(model.model.layers[0].mlp)
    assert norm not in kernels_of(model).feeding


def test_other_threads_and_other_passes_rotate_as_written(monkeypatch):
    model, _ = built("GLM-4")
    with_twins(monkeypatch)
    calls = []
    monkeypatch.setattr(TritonDecode, "rotate", staticmethod(lambda x, *args: calls.append(1) or x))
    kernels, home = kernels_of(model), importlib.import_module(type(model).__module__)
    q, k, (cos, sin) = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 3, 16), torch.randn(2, 1, 3, 16)
    home.apply_rotary_pos_emb(q, k, cos, sin)
    with kernels.computing():
        thread = threading.Thread(target=home.apply_rotary_pos_emb, args=(q, k, cos, sin))
        thread.start()
        thread.join()
        assert not calls
        home.apply_rotary_pos_emb(q, k, cos, sin)
    assert len(calls) == 2


def test_learner_and_sampler_wrap_a_rotation_once_each_in_any_order():
    model, _ = built("Granite 3")
    home, depths = importlib.import_module(type(model).__module__), []
    for _ in range(3):
        kernels_of(model)
        fuse(model)
        depth, function = 0, home.apply_rotary_pos_emb
        while hasattr(function, "func"):
            depth, function = depth + 1, function.args[0]
        depths.append(depth)
    assert depths == [2] * 3


def test_kernels_that_differ_leave_norms_to_the_modules_in_one_sentence(monkeypatch, caplog):
    model, _ = built("Phi-4")
    with_twins(monkeypatch)
    monkeypatch.setattr(TritonDecode, "norm", staticmethod(lambda x, *args: torch.zeros_like(x)))
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", attention="triton")
    assert sampler.attention == "triton"
    assert sampler.forward.in_kernels is None
    (record,) = [record for record in caplog.records if record.message.startswith("Norms and rotations")]
    assert "the engine's logits differ" in record.message


def test_a_norm_whose_forward_a_user_replaced_is_called(monkeypatch):
    model, _ = built("Phi-4")
    norm = model.model.norm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    assert norm not in kernels_of(model).norms


def test_a_forward_that_a_user_sets_later_is_called(monkeypatch):
    model, _ = built("Phi-4")
    with_twins(monkeypatch)
    kernels, norm, calls = kernels_of(model), model.model.norm, []
    norm.forward = lambda x: calls.append(1) or type(norm).forward(norm, x)
    with torch.no_grad(), kernels.computing():
        model(input_ids=torch.arange(4)[None])
    assert calls


def test_calls_by_keyword_and_without_keys_reach_the_function_as_written(monkeypatch):
    model, _ = built("Granite 3")
    with_twins(monkeypatch)
    home, norm = importlib.import_module(type(model).__module__), model.model.norm
    written, optional = home.apply_rotary_pos_emb, lambda q, k=None, cos=None, sin=None: (q, k, cos, sin)
    q, k, (cos, sin) = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 3, 16), torch.randn(2, 1, 3, 16)
    of_norm = type(norm).forward(norm, hidden_states=torch.ones(3, len(norm.weight)))
    for prepare in (kernels_of, fuse):
        prepare(model)
        by_keyword = home.apply_rotary_pos_emb(q=q, k=k, cos=cos, sin=sin)
        torch.testing.assert_close(by_keyword, written(q, k, cos, sin), atol=0, rtol=0)
    with kernels_of(model).computing():
        assert step_kernels._rotate(optional, KINDS[0], q, None, cos, sin) == (q, None, cos, sin)
        by_keyword = norm(hidden_states=torch.ones(3, len(norm.weight)))
    torch.testing.assert_close(by_keyword, of_norm, atol=0, rtol=0)


def test_rotations_bound_by_others_and_classes_of_unlisted_files_are_left_alone(monkeypatch):
    model, _ = built("Granite 3")
    home = importlib.import_module(type(model).__module__)
    attention = model.model.layers[0].self_attn
    bound = functools.partial(lambda q, k, cos, sin, scale: rotated(q, k, cos, sin, q.dtype, False, False), scale=1)
    monkeypatch.setattr(home, "apply_rotary_pos_emb", bound)
    attention.__class__ = type("Unlisted", (type(attention),), {"__module__": "not_listed"})
    for prepare in (lambda model: kernels_of(model).count, fuse):
        assert prepare(model) > 3
        assert home.apply_rotary_pos_emb.args[0] is bound
        home.apply_rotary_pos_emb = bound


@pytest.mark.parametrize("error", [AttributeError, AssertionError, KeyError])
def test_functions_that_fail_in_other_ways_are_left_to_the_modules(monkeypatch, error, caplog):
    model, _ = built("Granite 3")
    home = importlib.import_module(type(model).__module__)

    def fail(*args, **others):
        raise error("not for these")

    monkeypatch.setattr(home, "apply_rotary_pos_emb", fail)
    assert fuse(model)
    assert not replace_rotations(model.model, step_kernels._rotate)
    assert home.apply_rotary_pos_emb is fail
    monkeypatch.undo()
    with_twins(monkeypatch)
    monkeypatch.setattr(TritonDecode, "norm", staticmethod(fail))
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", attention="triton")
    assert sampler.forward.in_kernels is None
    assert "not for these" in caplog.text
