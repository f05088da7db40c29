"""What a rollout's texts and an update's size say, by hand-counted examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covey.monitor.measures import text_metrics
from covey.monitor.sample_drift import PromptDrift, divergence
from covey.monitor.updates import UpdateMeter
from covey.types import Group
from kit import completion, group, prompt, tiny_model

ONE = torch.ones(1)


def test_diversity_counts_distinct_completions_and_n_grams_of_a_group():
    found = text_metrics([group(["aab", "aab", "abc", "x"], rewards=[[0.0]] * 4)], ["math"], ONE)
    assert found["diversity/unique"].value == 3 / 4
    assert found["diversity/distinct_1"].value == 4 / 10  # a b c x
    assert found["diversity/distinct_2"].value == 3 / 6  # aa ab bc


def test_repetition_is_the_share_of_4_grams_that_were_there_before():
    found = text_metrics([group(["abababab", "abcdefgh", "abc"], rewards=[[0.0]] * 3)], ["math"], ONE)
    assert found["completions/repetition"].value == pytest.approx((3 / 5 + 0) / 2), "a text of 3 has no 4-gram"


def test_lengths_by_right_and_wrong():
    groups = [group(["a", "bbb", "cc", "dddd"], rewards=[[1.0], [1.0], [0.0], [0.5]])]
    found = text_metrics(groups, ["math"], ONE, [(0.0, 1.0)])
    assert found["completions/mean_length_right"].value == 2.0
    assert found["completions/mean_length_wrong"].value == 2.0
    read = completion("abcdef", mask=torch.tensor([True, False, False, False, True, True]))  # a tool's answer in it
    episode = [Group(prompt=prompt("1 + 1"), completions=(read,), rewards=torch.ones(1, 1))]
    assert text_metrics(episode, ["math"], ONE, [(0.0, 1.0)])["completions/mean_length_right"].value == 3.0
    half = [group(["a"], rewards=[[0.5]])]
    assert math.isnan(text_metrics(half, ["m"], ONE, [(0.0, 1.0)])["completions/mean_length_right"].value)
    assert "completions/mean_length_wrong" not in text_metrics(half, ["m"], ONE), "0 is not known to be wrong"


def test_the_format_rate_is_the_mean_of_the_reward_that_says_format():
    groups = [group(["a", "b", "c"], rewards=[[1.0, 1.0], [1.0, 0.0], [1.0, math.nan]])]
    assert text_metrics(groups, ["math", "think_format"], torch.ones(2))["format_rate"].value == 0.5
    assert "format_rate" not in text_metrics(groups, ["math", "length"], torch.ones(2))


def test_counts_and_lengths_of_prompts():
    groups = [group(["a", "b"], question="12345", rewards=[[0.0]] * 2), group(["a"], question="1", rewards=[[0.0]])]
    found = text_metrics(groups, ["math"], ONE)
    assert (found["num_prompts"].value, found["completions/count"].value) == (2.0, 3.0)
    assert found["prompts/mean_length"].value == 3.0


def test_empty_completions_are_measured_without_error():
    groups = [group(["", ""], rewards=[[0.0], [0.0]])]
    found = text_metrics(groups, ["math"], ONE)
    assert found["diversity/unique"].value == 0.5
    assert math.isnan(found["completions/repetition"].value)


def test_divergence_is_0_for_equal_and_log_2_for_disjoint_histograms():
    assert divergence(np.array([1.0, 3.0]), np.array([2.0, 6.0])) == pytest.approx(0.0)
    assert divergence(np.array([1.0, 0.0]), np.array([0.0, 5.0])) == pytest.approx(math.log(2))


def test_prompts_of_another_kind_drift_and_memory_survives_a_checkpoint():
    drift = PromptDrift()
    for _ in range(10):
        assert drift([group(["a"], question="abc")]) == {}
    again = PromptDrift()
    again.load_state_dict(drift.state_dict())
    same, other = [group(["a"], question="cab")], [group(["a"], question="xyz")]
    assert again(same)["prompts/drift"].value == pytest.approx(0.0)
    assert again(other)["prompts/drift"].value == pytest.approx(math.log(2))


def test_the_update_meter_measures_what_share_of_the_weights_a_step_moves():
    model = tiny_model(layers=2)
    meter = UpdateMeter(model)
    meter.before()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    meter.after()
    found = {name: metric.value for name, metric in meter.take().items()}
    assert found["update/all"] == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert found["update/embeddings"] == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert {"update/layers_00_00", "update/layers_01_01", "update/rest"} <= set(found)
    assert found["update/changed"] > 0.99 * sum(float((p != 0).sum()) for p in model.parameters()) / sum(
        p.numel() for p in model.parameters()
    )
    assert meter.take() == {}, "told once"


def test_the_update_of_an_adapter_is_that_of_the_product_over_the_frozen_matrix():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    meter = UpdateMeter(model)
    old = 2.0 * (b @ a).detach().clone()
    meter.before()
    with torch.no_grad():
        a.add_(0.03 * torch.randn_like(a))
        b.add_(0.02 * torch.randn_like(b))
    meter.after()
    moved = (2.0 * (b @ a).detach() - old).norm() / layer.get_base_layer().weight.norm()
    assert meter.take()["update/all"].value == pytest.approx(float(moved), rel=1e-4)


def test_the_size_of_an_adapters_update_is_not_read_number_by_number():
    """Each number read waits for a GPU: 672 waits took 0.26 s of a step with 7B."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules="all-linear"))
    meter, reads = UpdateMeter(model), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            reads.extend(["read"] * (function is torch.ops.aten._local_scalar_dense.default))
            return function(*args, **(kwargs or {}))

    for _ in range(2):  # the frozen matrices are measured once
        reads.clear()
        with Watch():
            meter.before()
            meter.after()
    assert not reads


def test_weights_too_coarse_to_move_are_counted():
    model = tiny_model(dtype=torch.bfloat16)
    meter = UpdateMeter(model)
    meter.before()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-6)
    meter.after()
    assert meter.take()["update/changed"].value < 0.1


def test_a_prompt_without_tokens_drifts_nowhere():
    empty = Group(prompt=prompt("", uid="0:1"), completions=(completion("a"),))
    assert PromptDrift()([empty]) == {}
