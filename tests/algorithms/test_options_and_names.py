"""TRL's option names compose what the presets compose; every option acts; names and changes behind commas are found."""

import inspect
import sys
from dataclasses import replace

import pytest
import torch

from covey import algorithms as alg
from covey.algorithms.samples import made_scores, made_tokens
from covey.errors import ConfigError
from covey.types import StepReport, Totals


@pytest.mark.parametrize(
    "options, preset",
    [
        ({"loss_type": "dapo", "epsilon_high": 0.28}, alg.dapo()),
        ({"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}, alg.grpo()),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, alg.dr_grpo()),
        ({"loss_type": "bnpo"}, alg.bnpo()),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            alg.gspo(),
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, alg.cispo()),
        ({"loss_type": "sapo"}, alg.sapo()),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
            alg.luspo(),
        ),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}, alg.vespo()),
    ],
)
def test_an_option_and_a_preset_of_one_name_are_one_thing(options, preset):
    composed, tokens = alg.from_options(**options), made_tokens()
    totals = Totals.of(tokens.mask, tokens.group, 16)
    assert composed.replace(name=preset.name, objective=preset.objective) == preset
    assert torch.equal(composed.loss(tokens, totals), preset.loss(tokens, totals))


def footprint(algorithm):
    """Numbers that tell two algorithms apart: loss off-policy, advantages, controllers, reference."""
    tokens, scores = (
        made_tokens(drift=1.0),
        made_scores(torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0)).double()),
    )
    scores = replace(scores, slices=("en", "de", "en"))
    totals = Totals.of(tokens.mask, tokens.group, 16)
    memory = algorithm.initial_controllers()
    loss = algorithm.resolve(memory).prepare(tokens.detached(), totals).loss(tokens, totals)
    seen = StepReport(step=512, metrics=algorithm.resolve(memory).metrics(tokens, totals))
    later = StepReport(step=7, metrics={})
    moved = sorted(algorithm.advance(memory, seen).items())
    alphas = (algorithm.reference(seen), algorithm.reference(later))
    return [loss.item(), algorithm.judge(scores)[0].sum(1).tolist(), algorithm.judge(scores)[0].tolist(), moved, alphas]


BESIDE = {
    "sapo_temperature_pos": {"loss_type": "sapo"},
    "sapo_temperature_neg": {"loss_type": "sapo"},
    **{f"vespo_{name}": {"loss_type": "vespo"} for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "max_completion_length": {"loss_type": "dr_grpo"},
    "use_bias_correction_kl": {"beta": 0.1},
    "ref_model_mixup_alpha": {"sync_ref_model": True},
    "ref_model_sync_steps": {"sync_ref_model": True},
    "vllm_importance_sampling_mode": {},
    **{
        name: {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.1}
        for name in ("entropy_coef_min", "entropy_coef_delta", "entropy_target")
    },
    "entropy_coef_max": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0},
    "use_adaptive_entropy": {"entropy_coef": 0.01},
}
CHANGED = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 0.1,
    "epsilon_high": 0.3,
    "delta": 1.05,
    "beta": 0.1,
    "use_bias_correction_kl": False,
    "scale_rewards": "none",
    "multi_objective_aggregation": "normalize_then_sum",
    "advantage_slices": "language",
    "max_completion_length": 99,
    "top_entropy_quantile": 0.2,
    "off_policy_mask_threshold": 0.01,
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "entropy_coef_min": 0.0095,
    "entropy_coef_max": 0.012,
    "entropy_coef_delta": 0.001,
    "entropy_target": 9.0,
    "sapo_temperature_pos": 2.0,
    "sapo_temperature_neg": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 0.5,
    "vllm_importance_sampling_clip_min": 0.99,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 7,
}


def test_every_option_is_tried_below():
    assert set(CHANGED) == set(inspect.signature(alg.from_options).parameters)


@pytest.mark.parametrize("name", CHANGED)
def test_every_option_changes_something(name):
    beside = BESIDE.get(name, {})
    assert footprint(alg.from_options(**beside)) != footprint(alg.from_options(**{**beside, name: CHANGED[name]}))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"loss_type": "dapoo"}, "loss_type='dapoo' is not known. Did you mean dapo?"),
        ({"importance_sampling_level": "seq"}, "importance_sampling_level='seq' is not known."),
        ({"scale_rewards": "std"}, "scale_rewards='std' is not known."),
        ({"multi_objective_aggregation": "normalise_then_sum"}, "Did you mean normalize_then_sum?"),
        ({"vllm_importance_sampling_mode": "token_trunc"}, "Did you mean token_truncate?"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_one(options, said):
    with pytest.raises(ConfigError) as caught:
        alg.from_options(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", alg.PRESETS)
def test_every_preset_is_found_by_name(name):
    assert alg.from_name(name) == alg.PRESETS[name]()
    assert alg.from_name(name).name == name


def test_options_and_parts_of_a_preset_behind_commas():
    found = alg.from_name("dapo, high=0.3, kl=0.01, aggregate=prompt_mean, weight=TopEntropy")
    assert found.objective == alg.Clipped(0.2, 0.3)
    assert found.kl == alg.KL(alg.k3, 0.01)
    assert found.aggregate is alg.prompt_mean
    assert found.weights == (*alg.dapo().weights, alg.TopEntropy())
    assert alg.from_name("grpo, kl=k2").kl == alg.KL(alg.k2, 0.04)


def test_a_file_may_import_its_neighbours_and_hides_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "shared_range_of_mine.py").write_text("LOW = 0.15\n")
    (tmp_path / "torch.py").write_text("raise SystemError('a file of the user hides a package')\n")
    (tmp_path / "ideas.py").write_text(
        "from covey import algorithms as alg\n"
        "def mine():\n"
        "    import torch\n"
        "    from shared_range_of_mine import LOW  # late, when it is called\n"
        "    return alg.dapo(low=LOW)\n"
    )
    assert alg.from_name(f"{tmp_path}/ideas.py:mine") == alg.dapo(low=0.15)


def test_ones_own_by_import_path(tmp_path):
    (tmp_path / "ideas.py").write_text(
        "from covey import algorithms as alg\n"
        "def mine(low=0.1): return alg.dapo(low=low)\n"
        "ready = alg.gspo()\n"
        "number = 3\n"
    )
    assert alg.from_name(f"{tmp_path}/ideas.py:mine") == alg.dapo(low=0.1)
    assert alg.from_name(f"{tmp_path}/ideas.py:mine, low=0.15") == alg.dapo(low=0.15)
    assert alg.from_name(f"{tmp_path}/ideas.py:ready") == alg.gspo()
    with pytest.raises(ConfigError, match="not an Algorithm nor a function"):
        alg.from_name(f"{tmp_path}/ideas.py:number")


@pytest.mark.parametrize(
    "name, said",
    [
        ("gspo_tokens", "Did you mean gspo_token?"),
        ("dapo, hihg=0.3", "Did you mean high?"),
        ("dapo, objective=Cliped", "Did you mean Clipped?"),
        ("dapo, high", "is no option=value"),
        ("dapo, kl=low_var", "Did you mean low_var_kl?"),
    ],
)
def test_a_typo_in_a_name_is_found(name, said):
    with pytest.raises(ConfigError) as caught:
        alg.from_name(name)
    assert said in str(caught.value)
