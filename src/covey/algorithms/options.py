"""TRL's option names on the same components: `from_options(loss_type="dapo")` composes what `dapo()` does."""

from typing import Any

from covey.algorithms.advantages import GroupNormalized
from covey.algorithms.aggregation import Constant, SequenceMean, SequenceSum, batch_token_mean, token_mean
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.baselines import NormalizeThenSum, SliceNormalized
from covey.algorithms.control import Controller
from covey.algorithms.importance import Correction, OffPolicyMask
from covey.algorithms.kl import KL, k3
from covey.algorithms.objectives import Clipped
from covey.algorithms.ratios import Level
from covey.algorithms.reference import Every, keep
from covey.algorithms.regularizers import AdaptiveEntropy, EntropyBonus, TopEntropy
from covey.algorithms.surrogates import CISPO, SAPO, VESPO
from covey.errors import ConfigError, did_you_mean
from covey.types import Advantage, Aggregate, Objective, Weight

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def from_options(
    *,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    scale_rewards: str | bool = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
    advantage_slices: str | None = None,
    max_completion_length: int | None = None,
    top_entropy_quantile: float = 1.0,
    off_policy_mask_threshold: float | None = None,
    entropy_coef: float = 0.0,
    use_adaptive_entropy: bool = False,
    entropy_coef_min: float = 0.0,
    entropy_coef_max: float = 1.0,
    entropy_coef_delta: float = 0.005,
    entropy_target: float = 0.2,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    vllm_importance_sampling_correction: bool = True,
    vllm_importance_sampling_mode: str = "sequence_mask",
    vllm_importance_sampling_clip_max: float | None = 3.0,
    vllm_importance_sampling_clip_min: float | None = None,
    sync_ref_model: bool = False,
    ref_model_mixup_alpha: float = 0.6,
    ref_model_sync_steps: int = 512,
) -> Algorithm:
    """The algorithm that TRL 1.16's GRPOConfig options describe, with TRL's defaults.

    `max_completion_length` is the constant of `dr_grpo`; None takes the trainer's. Raises ConfigError for an unknown word.
    """
    one_of("loss_type", loss_type, LOSS_TYPES)
    level = one_of("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    mode = vllm_importance_sampling_mode if vllm_importance_sampling_correction else None
    correction = _correction(mode, vllm_importance_sampling_clip_min, vllm_importance_sampling_clip_max)
    vespo = VESPO(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg, correction)
    smooth: dict[str, Objective] = {"vespo": vespo, "sapo": SAPO(sapo_temperature_pos, sapo_temperature_neg, level)}
    top_entropy = TopEntropy(top_entropy_quantile) if top_entropy_quantile < 1.0 else None
    off_policy = None if off_policy_mask_threshold is None else OffPolicyMask(off_policy_mask_threshold)
    steps = (entropy_coef_delta, entropy_coef_min, entropy_coef_max)
    adaptive = AdaptiveEntropy(entropy_target, entropy_coef, *steps, "entropy_selected" if top_entropy else "entropy")
    coefficient: float | Controller = adaptive if use_adaptive_entropy else entropy_coef
    return Algorithm(
        name=loss_type if level == "token" else f"{loss_type}/sequence",
        advantage=_advantage(scale_rewards, multi_objective_aggregation, advantage_slices),
        objective=smooth.get(loss_type) or _ratio_objective(loss_type, epsilon, epsilon_high, delta, level),
        aggregate=_aggregate(loss_type, max_completion_length),
        kl=KL(k3, beta, unbiased=use_bias_correction_kl, level=level) if beta else None,
        regularizers=(EntropyBonus(coefficient, top_entropy, token_mean),) if coefficient else (),
        weights=_present(off_policy, top_entropy, None if loss_type == "vespo" else correction),
        reference=Every(ref_model_sync_steps, ref_model_mixup_alpha) if sync_ref_model else keep,
    )


def one_of(option: str, value: Any, words: tuple[str, ...]) -> Any:
    """The value itself. Raises ConfigError, with the nearest word, unless it is one of `words`."""
    if value not in words:
        hint = did_you_mean(str(value), words) or f" It is one of {', '.join(words)}."
        raise ConfigError(f"{option}={value!r} is not known.{hint}")
    return value


def _ratio_objective(loss_type: str, low: float, high: float | None, delta: float | None, level: Level) -> Objective:
    if loss_type == "cispo":
        return CISPO(low if high is None else high, level=level)  # the ceiling itself; the fallback is TRL's
    return Clipped(low, high, delta, level=level)


def _advantage(scale_rewards: str | bool, aggregation: str, slices: str | None) -> Advantage:
    if isinstance(scale_rewards, bool):
        scale_rewards = "group" if scale_rewards else "none"
    scale = one_of("scale_rewards", scale_rewards, ("group", "batch", "none"))
    one_of("multi_objective_aggregation", aggregation, ("sum_then_normalize", "normalize_then_sum"))
    if slices is not None:
        if scale != "group" or aggregation != "sum_then_normalize":
            raise ConfigError(
                f"advantage_slices={slices!r} says what advantages are divided by, and so does scale_rewards={scale!r} or "
                f"multi_objective_aggregation={aggregation!r}; leave those at their defaults."
            )
        return SliceNormalized(slices)
    return NormalizeThenSum() if aggregation == "normalize_then_sum" else GroupNormalized(scale)


def _aggregate(loss_type: str, max_completion_length: int | None) -> Aggregate:
    if loss_type in ("grpo", "sapo"):
        return SequenceMean()
    if loss_type == "luspo":
        return SequenceSum()
    if loss_type == "dr_grpo":
        return Constant(max_completion_length)
    return batch_token_mean if loss_type == "bnpo" else token_mean


def _present(*weights: Weight | None) -> tuple[Weight, ...]:
    return tuple(weight for weight in weights if weight is not None)


def _correction(mode: str | None, low: float | None, high: float | None) -> Weight | None:
    if mode is None:
        return None
    level, _, how = one_of("vllm_importance_sampling_mode", mode, CORRECTION_MODES).partition("_")
    return Correction(level=level, mode=how, high=high, low=low)
