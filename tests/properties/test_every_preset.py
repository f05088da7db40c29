"""What every preset and every component keeps, whatever its formula: a new one is tested on the day it is born."""

import dataclasses
import itertools
from itertools import product

import pytest
import torch

from covey import algorithms as alg
from covey import testing
from covey.algorithms.check import LEAVES, step_gradients
from covey.algorithms.samples import made_scores, made_tokens
from covey.types import TokenBatch, Totals, merge_metrics
from kit import rest_nightly

PRESETS = {name: preset() for name, preset in alg.PRESETS.items()}
OPTIONS = {
    f"{loss_type}/{level}": alg.from_options(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.04,
        top_entropy_quantile=0.6,
        off_policy_mask_threshold=0.05,
        entropy_coef=0.01,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=1.1,
    )
    for loss_type, level in itertools.product(
        ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"), ("token", "sequence")
    )
}
AGGREGATES = (
    alg.token_mean,
    alg.batch_token_mean,
    alg.prompt_mean,
    alg.SequenceMean(),
    alg.SequenceMean("nonempty", 1e-8),
)
AGGREGATES += (alg.SequenceSum(), alg.SequenceSum("nonempty"), alg.RowMean(), alg.Constant(), alg.Constant(8.0, False))
OBJECTIVES = (
    alg.policy_gradient,
    alg.Clipped(0.2, 0.28, delta=1.5, dual=3.0),
    alg.Clipped(0.02, 0.03, level="sequence"),
    alg.Clipped(level="product", limit=20.0),
    alg.QuadraticPenalty(0.05),
    alg.QuadraticPenalty(level="sequence"),
    alg.GSPOToken(0.02, 0.03),
    alg.GMPO(0.2, only=alg.TopEntropy(0.5), correction=alg.Correction()),
    alg.CISPO(1.2, 0.8),
    alg.CISPO(1.2, 0.8, anchor="sampler"),
    alg.DRO(0.3),
    alg.SAPO(2.0, 3.0),
    alg.VESPO(correction=alg.Correction("token", "truncate", 1.2)),
    alg.DPPO(0.05, 0.05),
    alg.DPPO(0.01, 0.01, "kl"),
    alg.ClipCov(share=0.1, lower=0.01, upper=9.0),
    alg.TargetPolicy(0.5),
    alg.RewardsAsLabels(0.5),
    alg.KLCov(share=0.2),
    alg.Reshaped(alg.TeacherReweighted(0.7, 0.3)),
    alg.Reshaped(alg.TeacherReweighted(negative_only=True), alg.Clipped(level="sequence")),
    alg.Reshaped(alg.TeacherAdvantage(0.5, 1.0, "current"), alg.CISPO(2.0)),
    alg.Reshaped(alg.PositionWeighted(2.0), alg.policy_gradient),
    alg.Reshaped(alg.TeacherAdvantage(), alg.ClipCov(share=0.1, lower=0.01, upper=9.0)),
)
ADVANTAGES = (
    alg.GroupNormalized(),
    alg.GroupNormalized("batch"),
    alg.GroupNormalized("none"),
    alg.GroupNormalized(epsilon=1e-6, singleton="keep"),
    alg.NormalizeThenSum(),
    alg.LeaveOneOut(),
    alg.LeaveOneOut(clip=(-0.5, 0.5), whiten=True),
    alg.PassAtK(),
    alg.PKPO(1),
    alg.PKPO(3),
    alg.PKPO(2, "leave_one_out"),
    alg.GroupFiltered(keep=3),
    alg.GroupFiltered(alg.LeaveOneOut(), by="efficiency"),
    alg.OPO(),
    alg.GPG(),
    alg.MaxRL(),
    alg.ReinforcePlusPlus(),
    alg.ReinforcePlusPlus(baseline=True),
    alg.ReMax(),
    alg.OptimalTokenBaseline(),
    alg.OptimalTokenBaseline(zero_tail=False),
    alg.GAE(),
    alg.GAE(whitens=False),
    alg.Shaped(alg.GroupNormalized(), (alg.SoftOverlong(6, 3), alg.LengthPenalty())),
)
WEIGHTS = (
    alg.Correction(),
    alg.Correction("token", "truncate", 1.1, 0.9, normalize=True),
    alg.Correction("sequence", "truncate", 1.1, normalize=True),
    alg.OffPolicyMask(0.02),
    alg.VACO(0.1),
    alg.TopEntropy(0.3),
    alg.FutureKL(4.0, both_sides=True, safe_ratio=1.05),
    *(
        alg.Rejection(f"{level}_{k}", 1.2)
        for level in ("token", "seq_sum", "seq_mean", "seq_max")
        for k in ("k1", "k2", "k3")
    ),
)
SPLITS = ((6, 6), (1,) * 12, (5, 4, 3), (11, 1))
by_name = lambda part: getattr(part, "__name__", None) or repr(part)[:60]


def apart(a, b):
    """Largest difference of gradients, relative to the largest of them."""
    names = LEAVES
    size = max(a[name].abs().max().item() for name in names)
    return max((a[name] - b[name]).abs().max().item() for name in names) / max(size, 1e-30)


ALGORITHMS = {**PRESETS, **OPTIONS}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "dtype, tolerance",
    [pytest.param(torch.float64, 1e-6, marks=pytest.mark.nightly), (torch.float32, 1e-5)],
    ids=["float64", "float32"],
)
def test_splitting_a_step_does_not_change_the_gradient(name, dtype, tolerance):
    algorithm = ALGORITHMS[name]
    tokens = made_tokens(dtype=dtype, seed=3)
    whole = step_gradients(algorithm, tokens)
    assert max(whole[name].abs().max() for name in LEAVES) > 0
    for sizes in SPLITS if dtype == torch.float64 else SPLITS[1:3]:
        assert apart(whole, step_gradients(algorithm, tokens, sizes)) <= tolerance


MEASURED = {
    **ALGORITHMS,
    **{f"objective {by_name(part)}": alg.Algorithm(objective=part) for part in OBJECTIVES},
    **{f"weight {by_name(part)}": alg.Algorithm(weights=(part,)) for part in WEIGHTS},
}


@pytest.mark.parametrize("name", MEASURED)
def test_metrics_of_micro_batches_merge_to_those_of_the_step(name):
    tokens = made_tokens(seed=3)
    totals = Totals.of(tokens.mask, tokens.group, 16, tokens.observed)
    algorithm = MEASURED[name].prepare(tokens, totals)
    whole = algorithm.metrics(tokens, totals)
    for size in (1, 5):
        parts = [algorithm.metrics(tokens.rows(start, start + size), totals) for start in range(0, 12, size)]
        merged = {key: metric.value for key, metric in merge_metrics(parts).items()}
        assert merged == pytest.approx({key: metric.value for key, metric in whole.items()}, abs=1e-9, nan_ok=True)


PAIRS = [*product(OBJECTIVES, AGGREGATES)]


@pytest.mark.parametrize("number", rest_nightly(range(len(PAIRS)), range(0, len(PAIRS), 7)))
def test_every_objective_with_every_aggregate_ignores_split_order_and_padding(number):
    objective, aggregate = PAIRS[number]
    algorithm = alg.Algorithm(objective=objective, aggregate=aggregate, kl=alg.KL(unbiased=True))
    tokens = made_tokens(seed=5)
    whole = step_gradients(algorithm, tokens)
    assert apart(whole, step_gradients(algorithm, tokens, (5, 1, 6))) <= 1e-6
    order = torch.randperm(12)
    moved = step_gradients(algorithm, TokenBatch(**{name: x[order] for name, x in tokens.tensors().items()}))
    back = {name: x if name == "loss" else x[order.argsort()] for name, x in moved.items()}
    assert apart(whole, back) <= 1e-6
    wide = {
        name: x if x.ndim == 1 or x.shape[1] == 1 else torch.nn.functional.pad(x, (0, 9))
        for name, x in tokens.tensors().items()
    }
    padded = step_gradients(algorithm, TokenBatch(**wide))
    assert apart(whole, {name: x if name == "loss" else x[:, :7] for name, x in padded.items()}) <= 1e-6


def parts_of(preset):
    """(check, part) of each part."""
    yield testing.check_advantage, preset.advantage
    yield testing.check_objective, preset.objective
    yield testing.check_aggregate, preset.aggregate
    yield testing.check_reference, preset.reference
    yield from ((testing.check_weight, weight) for weight in preset.weights)
    yield from ((testing.check_kl, kl) for kl in (preset.kl,) if kl is not None)
    yield from ((testing.check_critic, critic) for critic in (preset.critic,) if critic is not None)


PARTS = {(check.__name__, repr(part)): (check, part) for preset in PRESETS.values() for check, part in parts_of(preset)}
"""Presets share most of them."""


@pytest.mark.parametrize("check, part", PARTS.values(), ids=lambda value: getattr(value, "__name__", None))
def test_every_part_of_a_preset_passes_its_check(check, part):
    check(part)


@pytest.mark.parametrize("part", OBJECTIVES, ids=by_name)
def test_every_objective_passes_its_check(part):
    testing.check_objective(part)


@pytest.mark.parametrize("part", ADVANTAGES, ids=by_name)
def test_every_advantage_passes_its_check(part):
    testing.check_advantage(part)


@pytest.mark.parametrize("part", WEIGHTS, ids=by_name)
def test_every_weight_passes_its_check(part):
    testing.check_weight(part)


@pytest.mark.parametrize("name", alg.ESTIMATORS)
def test_every_kl_estimator_passes_its_check(name):
    testing.check_kl(alg.ESTIMATORS[name])


@pytest.mark.parametrize(
    "part",
    [
        alg.EntropyBonus(),
        alg.EntropyBonus(only=alg.TopEntropy(0.3)),
        alg.GatedDistill(0.5, 2.0),
        alg.Distill("x", weight=0.3),
        alg.Distill("policy", feedback="best", entropy_sensitivity=1.0),
    ],
    ids=by_name,
)
def test_every_regularizer_passes_its_check(part):
    testing.check_regularizer(part)


@pytest.mark.parametrize("part", [alg.keep, alg.Every(2), alg.EMA(0.9), alg.WhenFar(), alg.FrozenAt(2)], ids=by_name)
def test_every_reference_rule_passes_its_check(part):
    testing.check_reference(part)


@pytest.mark.parametrize("part", [alg.AdaptiveKL(0.05), alg.AdaptiveEntropy(start=0.01)], ids=by_name)
def test_every_controller_passes_its_check(part):
    testing.check_controller(part)


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_the_gradient_is_the_policy_gradient_of_the_same_aggregate(name):
    """Each token's gradient is that of -A logp under the preset's own aggregate."""
    preset = dataclasses.replace(PRESETS[name], kl=None)
    if "policy_gradient" in getattr(preset.objective, "exempt", ()):
        pytest.skip("is no policy gradient")
    tokens = made_tokens(drift=0.0)
    found = step_gradients(preset, tokens)["logp"]
    plain = dataclasses.replace(preset, objective=alg.policy_gradient)
    if name == "rloo":
        plain = dataclasses.replace(
            plain, aggregate=alg.SequenceSum()
        )  # one action a completion: log-probabilities add
    assert torch.allclose(found, step_gradients(plain, tokens)["logp"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_the_ratio_is_exactly_one(name):
    tokens = made_tokens(drift=0.0, dtype=torch.float32)
    assert bool((tokens.ratio == 1.0).all())
    metrics = PRESETS[name].metrics(tokens, Totals.of(tokens.mask, tokens.group, 16))
    assert metrics["approx_kl"].value == 0.0
    assert all(metric.value == 0.0 for key, metric in metrics.items() if key.startswith("clip_ratio/"))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("value", rest_nightly([0.35, 0.1, 0.95], 1))
def test_tied_groups_teach_exactly_nothing_in_float32(name, value):
    advantage = PRESETS[name].advantage
    if "tied_groups" in getattr(advantage, "exempt", ()):
        pytest.skip("does not compare within the group")
    for size in range(2, 17):
        rewards = torch.full((3, size, 1), value, dtype=torch.float32)
        judged, _ = PRESETS[name].judge(made_scores(rewards, dtype=torch.float32))
        assert not judged.any()


@pytest.mark.parametrize("name", PRESETS)
def test_micro_batch_metrics_merge_to_those_of_the_step(name):
    tokens = made_tokens(seed=2)
    totals = Totals.of(tokens.mask, tokens.group, 16)
    preset = PRESETS[name].prepare(tokens.detached(), totals)
    whole = preset.metrics(tokens, totals)
    first, second = preset.metrics(tokens.rows(0, 5), totals), preset.metrics(tokens.rows(5, 12), totals)
    assert set(whole) == set(first)
    for key, metric in whole.items():
        assert (first[key] + second[key]).value == pytest.approx(metric.value, rel=1e-9, abs=1e-12, nan_ok=True)
