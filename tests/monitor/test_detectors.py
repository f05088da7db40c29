"""Every detector: a planted fault is seen, honest learning and a flat run are not."""

import random
from collections.abc import Callable, Mapping

import pytest

from covey.config.alerts import ALERT_RULES
from covey.monitor.detectors import standard
from covey.monitor.history import History, together
from kit import rest_nightly

Values = dict[str, float]
Change = Callable[[int, Values, random.Random], Mapping[str, float]]


def metrics_of(step: int, draw: random.Random, skill: float) -> Values:
    """What a healthy step reports when a share `skill` of the completions is right."""
    own = random.Random(step)
    around = lambda value, noise: value * (1 + noise * draw.gauss(0, 1))
    spread = max(skill * (1 - skill), 1e-4) ** 0.5
    return {
        "reward": min(1.0, max(0.0, skill + spread * draw.gauss(0, 1) / 16**0.5 / 1.5)),
        "reward_std": spread, "num_prompts": 16.0, "completions/count": 128.0, "rewards/audit/mean": around(skill, 0.02),
        "rewards/math/mean": skill * (1 + 0.05 * own.gauss(0, 1)), "rewards/length/mean": -30 - 20 * skill + own.gauss(0, 2),
        "groups/all_pass": skill**8, "groups/all_fail": (1 - skill) ** 8, "rewards/unscored": 0.0, "rewards/math/errors": 0.0,
        "frac_reward_zero_std": skill**8 + (1 - skill) ** 8, "entropy": around(1.2 - 0.6 * skill, 0.03),
        "diversity/unique": around(0.9 - 0.3 * skill, 0.03), "kl": abs(around(0.02 * skill, 0.2)),
        "completions/mean_length": around(120, 0.05), "completions/clipped_ratio": abs(around(0.04, 0.3)),
        "completions/repetition": abs(around(0.05, 0.2)), "format_rate": min(1.0, around(0.8, 0.03)),
        "grad_norm": abs(around(0.5, 0.3)) + 0.05, "learning_rate": 1e-5, "update/all": around(2e-4, 0.1), "update/changed": 0.9,
        "sampling/sampling_logp_difference/mean": 0.004, "sampling/effective_sample_size": 0.99, "steps/non_finite": 0.0,
        "tokens_per_second/step": around(2000, 0.1), "seconds/rollout": 1.0, "seconds/learn": 1.0, "seconds/reward": 0.1,
        "prompts/drift": abs(around(0.05, 0.1)), "prompts/mean_length": around(60, 0.05),
        "ensemble/peer/asked": 1.0, "ensemble/peer/used": 0.6, "ensemble/peer/lost": 0.0, "ensemble/peer/reward": 0.6,
        "ensemble/peer/share": 0.3, "ensemble/peer/win_rate": 0.6,
        "prompts/drift_p/text": 0.02 + 0.98 * own.random(), "prompts/drift_p/length": 1.0, "rewards/drift_p": 1.0,
        "experts/entropy": around(0.95, 0.01), "experts/max_load": around(0.2, 0.05), "experts/changed": abs(around(0.01, 0.5)),
        "tools/call_frequency": 1.5, "tools/failure_frequency": 0.1, "tools/looping": 0.02,
        "languages/de/same": 1.0 - 0.02 * own.random(), "languages/de/count": 40.0,
    }  # fmt: skip


def honest(step: int) -> float:
    """Skill of a run that learns: 0.25 to 0.75 over 150 steps."""
    return 0.25 + 0.5 * min(step, 150) / 150


def rules_of(
    change: Change | None = None,
    *,
    seed: int = 0,
    steps: int = 150,
    skill: Callable[[int], float] = honest,
    until: str = "",
):
    """Names of the rules that speak in a run, with the first alert of each. From step 60 on `change` is planted.

    The run ends early when the rule `until` has spoken.
    """
    draw, seen, found = random.Random(seed), History(), {}
    detectors = standard(("rewards/audit/mean",), {"math": 1.0, "length": 0.002})
    for step in range(1, steps + 1):
        values = metrics_of(step, draw, skill(step))
        if change is not None and step > 60:
            values |= change(step - 60, values, draw)
        seen.add(step, values)
        for detector in detectors:
            alert = detector(seen)
            if alert is not None:
                found.setdefault(alert.rule, alert)
        if until in found:
            break
    return found


def to(name: str, value: float) -> Change:
    return lambda t, values, draw: {name: value}


def by(name: str, factor: float, over: int = 30) -> Change:
    """The metric is multiplied by a factor, little by little."""
    return lambda t, values, draw: {name: values[name] * factor ** min(1.0, t / over)}


def stuck(step: int) -> float:
    """The skill of a run that learns nothing more after step 60."""
    return honest(min(step, 60))


FAULTS: dict[str, tuple[Change | None, Callable[[int], float]]] = {
    "data_drift": (to("prompts/drift_p/text", 1e-5), honest),
    "dead_groups": (to("frac_reward_zero_std", 1.0), honest),
    "diversity_loss": (by("diversity/unique", 0.2), lambda step: 0.4),
    "entropy_collapse": (by("entropy", 0.02), lambda step: 0.4),
    "entropy_explosion": (by("entropy", 5.0), lambda step: 0.4),
    "forgetting": (lambda t, values, draw: {"eval_forgetting": 0.1, "eval_forgetting/p": 1e-5}, honest),
    "format_loss": (by("format_rate", 0.4), honest),
    "gradient_spike": (lambda t, values, draw: {"grad_norm": 60.0} if t == 20 else {}, honest),
    "kl_runaway": (lambda t, values, draw: {"kl": 0.02 * 1.3**t}, honest),
    "large_updates": (to("update/all", 0.4), honest),
    "language_collapse": (to("languages/de/same", 0.6), honest),
    "length_collapse": (by("completions/mean_length", 0.1), honest),
    "length_explosion": (by("completions/mean_length", 4.0), honest),
    "member_dominates": (to("ensemble/peer/share", 0.97), honest),
    "member_idle": (to("ensemble/peer/used", 0.0), honest),
    "non_finite": (lambda t, values, draw: {"steps/non_finite": float(t == 5)}, honest),
    "repeated_text": (by("completions/repetition", 12.0), honest),
    "reward_collapse": (to("reward", 0.05), honest),
    "reward_conflict": (by("rewards/math/mean", 0.01), honest),
    "reward_drift": (to("rewards/drift_p", 1e-5), honest),
    "reward_errors": (to("rewards/math/errors", 40.0), honest),
    "reward_hacking": (by("rewards/audit/mean", 0.3), honest),
    "reward_plateau": (None, stuck),
    "reward_swings": (lambda t, values, draw: {"reward": 0.5 + 0.45 * (-1) ** t}, honest),
    "router_drift": (by("experts/entropy", 0.4), honest),
    "sampler_mismatch": (to("sampling/sampling_logp_difference/mean", 0.4), honest),
    "slow_convergence": (None, lambda step: 0.3),
    "teacher_collapse": (
        lambda t, values, draw: {
            "teacher/gap": -0.3 * 0.01 ** min(1.0, t / 30),
            "entropy": values["entropy"] * 0.02 ** min(1.0, t / 30),
        },
        lambda step: 0.4,
    ),
    "teacher_leak": (
        lambda t, values, draw: {
            "teacher/gap": -0.3 * 0.4 ** min(1.0, t / 30),
            "reward": values["reward"] * 0.5 ** min(1.0, t / 30),
        },
        lambda step: 0.4,
    ),
    "teacher_worse": (lambda t, values, draw: {"teacher/agreement": -0.4 + 0.2 * draw.gauss(0, 1)}, honest),
    "throughput_drop": (by("tokens_per_second/step", 0.2, 1), honest),
    "tiny_updates": (to("update/all", 3e-7), lambda step: 0.3),
    "tool_collapse": (to("tools/call_frequency", 0.0), honest),
    "truncation": (to("completions/clipped_ratio", 0.8), honest),
    "update_spike": (lambda t, values, draw: {"update/all": 0.02} if t == 20 else {}, honest),
}


def test_every_rule_has_a_planted_fault():
    assert set(FAULTS) == set(ALERT_RULES) - {"detector_failed"}, "that one is of detectors of the user's own"


@pytest.mark.parametrize("rule", sorted(FAULTS))
def test_a_planted_fault_is_seen_with_evidence_and_a_remedy(rule):
    change, skill = FAULTS[rule]
    found = rules_of(change, steps=200, skill=skill, until=rule)
    assert rule in found, f"only {sorted(found)} spoke"
    alert = found[rule]
    assert alert.said
    assert alert.try_this
    assert alert.evidence
    assert alert.step > 20
    assert all(value == value for value in alert.evidence.values())


def test_routers_that_choose_other_experts_than_the_sampler_are_named():
    alert = rules_of(to("experts/changed", 0.4))["router_drift"]
    assert "of the learner's choices of experts are not the sampler's" in alert.said


def test_an_expert_that_nearly_all_tokens_choose_is_named_by_its_load():
    """With two of eight experts for each token, the entropy may still be high."""
    alert = rules_of(to("experts/max_load", 0.88))["router_drift"]
    assert "88% of the tokens go to one expert" in alert.said


@pytest.mark.parametrize(("gain", "is_told"), [(0.6, False), (1.3, True)])
def test_entropy_that_started_high_explodes_by_what_it_gains(gain, is_told):
    """Three times 0.96 nats a token may be more than the vocabulary has; one nat more is e times as many choices."""
    change = lambda t, values, draw: {"entropy": values["entropy"] + gain * min(1.0, t / 10)}
    assert ("entropy_explosion" in rules_of(change, steps=120, skill=lambda step: 0.4)) is is_told


@pytest.mark.parametrize("seed", rest_nightly(range(5), 2))
def test_honest_learning_is_silent(seed):
    assert not rules_of(seed=seed)


@pytest.mark.parametrize("seed", rest_nightly(range(5), 2))
def test_a_flat_run_is_told_only_that_it_does_not_learn(seed):
    assert set(rules_of(seed=seed, skill=lambda step: 0.4)) <= {"slow_convergence"}


def test_learning_that_ends_with_everything_solved_is_not_a_fault():
    assert set(rules_of(skill=lambda step: min(0.995, 0.25 + step / 100), steps=200)) <= {"dead_groups"}


def test_dead_groups_says_whether_prompts_are_solved_or_hopeless():
    solved = rules_of(lambda t, v, d: {"frac_reward_zero_std": 1.0, "groups/all_pass": 1.0, "groups/all_fail": 0.0})
    hopeless = rules_of(lambda t, v, d: {"frac_reward_zero_std": 1.0, "groups/all_pass": 0.0, "groups/all_fail": 1.0})
    assert solved["dead_groups"].severity == "info"
    assert "harder" in solved["dead_groups"].try_this[0]
    assert hopeless["dead_groups"].severity == "warning"
    assert "easier" in hopeless["dead_groups"].try_this[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (to("tools/call_frequency", 0.0), "no longer called"),
        (to("tools/looping", 0.6), "same call three times"),
        (to("tools/failure_frequency", 1.0), "100% of the calls"),
    ],
)
def test_tools_that_are_given_up_called_in_loops_or_always_fail_are_told_apart(change, said):
    assert said in rules_of(change)["tool_collapse"].said


def test_tools_that_were_never_called_are_told_of_after_twenty_steps():
    draw, seen, found = random.Random(0), History(), []
    for step in range(1, 26):
        seen.add(step, metrics_of(step, draw, 0.4) | {"tools/call_frequency": 0.0, "tools/looping": 0.0})
        found += [
            alert.step for one in standard() if (alert := one(seen)) is not None and alert.rule == "tool_collapse"
        ]
    assert found[0] == 20


def test_evidence_of_several_parts_is_flat_and_says_whose_each_number_is():
    seen = History()
    seen.add(1, {})
    alerts = [
        seen.alert("teacher_worse", "info", f"{name} is", ["x"], parts=name, used=used)
        for name, used in (("a", 0.5), ("b", 0.25))
    ]
    joined = together(alerts)
    assert joined is not None
    assert joined.evidence == {"a: used": 0.5, "b: used": 0.25}


def test_a_run_without_tools_is_not_told_that_it_calls_none():
    draw, seen = random.Random(0), History()
    for step in range(1, 40):
        values = {name: one for name, one in metrics_of(step, draw, 0.4).items() if not name.startswith("tools/")}
        seen.add(step, values)
        assert all(alert is None or alert.rule != "tool_collapse" for alert in (one(seen) for one in standard()))


def test_length_that_grows_with_the_reward_is_learning_not_an_explosion():
    assert "length_explosion" not in rules_of(by("completions/mean_length", 2.0))


def test_tied_groups_are_not_taken_for_tiny_updates():
    nothing = {"update/all": 0.0, "update/changed": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
    assert "tiny_updates" not in rules_of(lambda t, v, d: nothing, skill=lambda step: 0.3)


@pytest.mark.parametrize("seed", rest_nightly(range(20), 2))
def test_noise_of_few_prompts_is_no_collapse(seed):
    noisy = lambda t, values, draw: {"reward": values["reward"] + draw.gauss(0, 0.08)}
    assert "reward_collapse" not in rules_of(noisy, seed=seed, steps=250, skill=lambda step: 0.4)


def test_an_audit_that_rises_with_the_reward_is_no_hacking():
    assert "reward_hacking" not in rules_of(by("rewards/audit/mean", 1.5))
