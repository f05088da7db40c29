"""Detectors for optimizer steps: spikes, tiny updates, and a mismatch between sampler and learner."""

import math
from collections.abc import Sequence
from statistics import fmean, median

from covey.monitor.detectors.blame import LOWER_RATE, MOST
from covey.monitor.history import RECENT, History, has_risen
from covey.types import Alert


def spike(
    seen: History,
    *,
    metric: str = "grad_norm",
    rule: str = "gradient_spike",
    times: float = 10.0,
    rarity: float = 1e5,
    enough: int = 20,
) -> Alert | None:
    """`gradient_spike` or `update_spike`: a value far above its median, and rarer than one in `rarity` of this run's own steps.

    Large gradients follow a power law (Simsekli et al. 2019). Its exponent is estimated from how far the largest fifth of the values lie
    above the rest (Hill 1975), by the median of their logarithms, so that an earlier spike is not taken for the rule.

    Steps whose groups are all tied are left out: where most are, the gradient of an ordinary step is far above the median of all.
    """
    values = _with_signal(seen, metric)
    if len(values) <= enough or seen[metric].last(1) != values[-1:]:
        return None
    usual, now = median(values[:-1]), values[-1]
    if now < times * usual or now < _rare(values[:-1], rarity):
        return None
    sentence = f"{metric} is {now:.3g}, {now / usual:.0f} times its usual {usual:.3g}"
    return seen.alert(
        rule, "warning", sentence,
        (
            "look at this step's completions in rollouts/: one odd prompt or reward is the usual cause",
            "lower max_grad_norm or learning_rate if it comes again; on_spike='skip' leaves such updates out",
        ),
        now=now, usual=usual, learning_rate=_latest(seen, "learning_rate"),
    )  # fmt: skip


def _with_signal(seen: History, metric: str) -> list[float]:
    """The latest values above 0 of steps in which some group's rewards differ."""
    series, tied = seen[metric], seen["frac_reward_zero_std"]
    values = series.last(RECENT)
    shares = tied.last(RECENT) if tied.count == series.count else [0.0] * len(values)
    return [value for value, share in zip(values, shares, strict=True) if value > 0 and share < 1]


def non_finite(seen: History) -> Alert | None:
    """`non_finite`: the loss or the gradient of a step was not a number. Such an update is never made."""
    if not any(seen["steps/non_finite"].last(1)):
        return None
    sentence = f"the loss or gradient of step {seen.step} is not finite{_at_rate(seen)}; the update was left out"
    return seen.alert(
        "non_finite", "error", sentence,
        (
            "lower learning_rate",
            "look at the batch, which is kept in bad_steps/",
            "compute in float32 or bfloat16 rather than float16",
        ),
        grad_norm=_latest(seen, "grad_norm"), learning_rate=_latest(seen, "learning_rate"),
    )  # fmt: skip


def large_updates(seen: History, *, most: float = MOST) -> Alert | None:
    """`large_updates`: a step moved the weights by a good part of their size. One such step can undo what a model knows."""
    size = _latest(seen, "update/all")
    if size is None or size < most:
        return None
    sentence = (
        f"the step moved the weights by {size:.0%} of their size{_at_rate(seen)}: the model's knowledge may be lost"
    )
    return seen.alert(
        "large_updates", "error", sentence, (LOWER_RATE, "go back to a checkpoint from before it"),
        update_size=size, learning_rate=_latest(seen, "learning_rate"),
    )  # fmt: skip


def tiny_updates(seen: History, *, least: float = 1e-5, changed: float = 0.1, window: int = 10) -> Alert | None:
    """`tiny_updates`: at the full learning rate a step moves the weights by less than `least` of their size, or most
    weights are too coarse to move, and the reward has not risen. Steps without signal, whose groups are tied, do not count."""
    moved, rate = seen["update/all"].last(50), seen["learning_rate"].last(50)
    tied, norms = seen["frac_reward_zero_std"].last(window), seen["grad_norm"].last(window)
    has_signal = fmean(tied or [0.0]) < 0.5 and median(norms or [1.0]) > 0
    if len(moved) < window or not rate or not has_signal or has_risen(seen):
        return None
    peak = max([*rate, *seen["learning_rate"].first])
    scale = peak / max(fmean(rate[-len(moved) :]), 1e-30) if peak else 1.0
    size = median(moved) * min(scale, 1e3)
    stuck = median(seen["update/changed"].last(window) or [1.0]) if peak and rate[-1] >= 0.5 * peak else 1.0
    if size >= least and stuck >= changed:
        return None
    if stuck < changed:
        sentence = f"a step changes {stuck:.1%} of the weights; the others round back to what they were"
        advice = (
            "keep the weights in float32 (model_init_kwargs={'dtype': 'float32'}; bf16=True computes in bfloat16 all the same)",
        )
    else:
        sentence = f"a step at the peak learning rate of {peak:.3g} moves the weights by {size:.1g} of their size: hardly at all"
        advice = (
            "raise learning_rate: LoRA wants 1e-5 to 2e-4, full training about 1e-6 to 3e-6, models below 100 million weights 1e-4 to 1e-3",
        )
    return seen.alert(
        "tiny_updates", "warning", sentence, advice, update_size=size, changed_weights=stuck, learning_rate=peak
    )


def sampler_mismatch(seen: History, *, nats: float = 0.1, effective: float = 0.5, window: int = 5) -> Alert | None:
    """`sampler_mismatch`: sampler and learner give different log-probabilities to the same tokens, or importance weights
    leave few tokens that count."""
    gaps = seen["sampling/sampling_logp_difference/mean"].last(window)
    sizes = seen["sampling/effective_sample_size"].last(window)
    gap = median(gaps) if len(gaps) == window else 0.0
    size = median(sizes) if len(sizes) == window else 1.0
    if gap < nats and size > effective:
        return None
    sentence = (
        f"sampler and learner differ by {gap:.2g} nats a token; importance weights leave {size:.0%} of the tokens"
    )
    return seen.alert(
        "sampler_mismatch", "warning", sentence,
        (
            "sample in the learner's precision (rollout_dtype='float32') and with its temperature",
            "truncate importance weights (vllm_importance_sampling_mode='token_truncate')",
            "use completions for fewer steps (steps_per_generation, num_iterations)",
        ),
        logp_difference=gap, effective_sample_size=size,
    )  # fmt: skip


def _rare(values: Sequence[float], rarity: float) -> float:
    """The value that one in `rarity` exceeds, if the largest fifth of these follow a power law."""
    ordered = sorted(values)
    bar, *above = ordered[-(len(ordered) // 5) - 1 :]
    middle = median(math.log(value / bar) for value in above)
    slope = middle / math.log(2)  # the mean of an exponential, from its median
    return float(bar * (rarity * len(above) / len(ordered)) ** slope)


def _at_rate(seen: History) -> str:
    rate = _latest(seen, "learning_rate")
    return "" if rate is None else f" at a learning_rate of {rate:.3g}"


def _latest(seen: History, name: str) -> float | None:
    last = seen[name].last(1)
    return last[0] if last else None
