"""Detectors for the policy: entropy, diversity, KL from its start, groups without signal, drifting routers."""

from statistics import fmean, median
from typing import Any

from covey.monitor.detectors.blame import blamed
from covey.monitor.history import History, has_risen, logs, may_have_risen, shift, since_start, together
from covey.types import Alert

_FLATTER = (
    "lower learning_rate, or stop earlier",
    "clip higher (epsilon_high=0.28), or add an entropy bonus (entropy_coef, use_adaptive_entropy)",
    "raise temperature while sampling",
)


def entropy_collapse(
    seen: History, *, share: float = 0.2, alike: float = 0.25, tied: float = 0.9, window: int = 10, z: float = 4.0
) -> Alert | None:
    """`entropy_collapse`: entropy is down to a fraction of its start, beyond noise, and the task is not solved: completions of a
    group are all but the same and their rewards tied, or the reward has not risen for it.

    `alike`: distinct completions of a group, as a share. `tied`: share of groups without signal; while others are left, alike
    completions are what learning one answer looks like.
    """
    entropy, unique = seen["entropy"], seen["diversity/unique"]
    if entropy.count < 2 * window:
        return None
    begun, now = median(entropy.start(window)), median(entropy.last(window))
    if not 0 <= now < share * begun:
        return None
    if shift(logs(entropy.start(window)), logs(entropy.last(window))).z > -z:
        return None
    distinct = fmean(unique.last(window)) if unique.count else 1.0
    before = fmean(unique.start(window)) if unique.count else 1.0
    is_solved = fmean(seen["groups/all_pass"].last(window) or [0.0]) > 0.5
    is_alike = distinct < alike and distinct < 0.5 * before
    has_no_signal = fmean(seen["frac_reward_zero_std"].last(window) or [0.0]) >= tied
    if is_solved or (may_have_risen(seen) and not (is_alike and has_no_signal)):
        return None
    sentence = (
        f"entropy fell from {begun:.3g} to {now:.3g} nats a token; of a group's completions {distinct:.0%} are distinct"
    )
    return seen.alert(
        "entropy_collapse", "warning", sentence, _FLATTER,
        entropy_start=begun, entropy_now=now, distinct_completions=distinct, **_rewards(seen),
    )  # fmt: skip


def entropy_explosion(
    seen: History, *, times: float = 3.0, at_least: float = 0.5, gain: float = 1.0, window: int = 5, z: float = 4.0
) -> Alert | None:
    """`entropy_explosion`: entropy is far above its start: the policy turns to noise.

    `at_least`: nats that it must have gained. `gain`: nats that are enough from any start, e times as many choices a token: three
    times the entropy may be more than there is.
    """
    entropy = seen["entropy"]
    if entropy.count < 3 * window:
        return None
    begun, now = median(entropy.start(10)), median(entropy.last(window))
    has_multiplied = now >= times * begun and now >= begun + at_least
    if not (has_multiplied or now >= begun + gain) or has_risen(seen):
        return None
    if shift(entropy.start(10), entropy.last(window)).z < z:
        return None
    sentence = f"entropy rose from {begun:.3g} to {now:.3g} nats a token: completions turn to noise"
    advice = ("lower learning_rate", "lower entropy_coef", "go back to an earlier checkpoint")
    return seen.alert(
        "entropy_explosion", "error", *blamed(seen, sentence, advice),
        entropy_start=begun, entropy_now=now, **_rewards(seen),
    )  # fmt: skip


def diversity_loss(seen: History, *, share: float = 0.5, window: int = 10) -> Alert | None:
    """`diversity_loss`: completions of a group have become alike, and the reward does not explain it."""
    moved = since_start(seen["diversity/unique"], window)
    is_solved = fmean(seen["groups/all_pass"].last(window) or [0.0]) > 0.5
    if moved is None or moved.after > share * moved.before or moved.z > -4 or is_solved or may_have_risen(seen):
        return None
    sentence = f"of a group's completions {moved.after:.0%} are distinct, {moved.before:.0%} at the start, and the reward has not risen"
    return seen.alert(
        "diversity_loss", "warning", sentence, _FLATTER,
        distinct_start=moved.before, distinct_now=moved.after, z=moved.z, **_rewards(seen),
    )  # fmt: skip


def kl_runaway(seen: History, *, high: float = 0.5, times: float = 3.0) -> Alert | None:
    """`kl_runaway`: the distance to the reference is large, and growing by multiples.

    Single steps may jump by a hundred times, so the latest five must all be above the twenty before: were all 25 drawn alike, that
    would be so once in C(25, 5) = 53,130 looks, whatever their distribution (a rank test, Wilcoxon 1945).

    `high`: nats a token that no useful policy needs while it is still growing.
    """
    series = seen["kl"]
    earlier = series.last(25)[:-5]
    if not earlier:
        return None
    before, now = median(earlier), median(series.last(5))
    if now < high or now < times * before or min(series.last(5)) < max(earlier):
        return None
    sentence = f"the policy runs away from the reference: kl {before:.3g} to {now:.3g} nats a token"
    advice = (
        "lower learning_rate, or raise beta",
        "go back to an earlier checkpoint: alert_actions={'kl_runaway': 'roll_back'} does it by itself",
        "look at the latest completions: a reward that pays for odd text pulls the policy away",
    )
    return seen.alert(
        "kl_runaway", "error", *blamed(seen, sentence, advice),
        kl_before=before, kl_now=now, **_rewards(seen),
    )  # fmt: skip


def dead_groups(seen: History, *, share: float = 0.9, window: int = 10) -> Alert | None:
    """`dead_groups`: nearly all groups have tied rewards, so that a step has nearly no gradient.

    For information alone where the task is solved: most groups all right, or, of rewards that do not say what is right, a reward
    that has come to rest at its highest value by degrees. One that ties all groups from one step to the next is a fault.
    """
    tied = seen["frac_reward_zero_std"].last(window)
    if len(tied) < window or fmean(tied) < share:
        return None
    sentence = f"{fmean(tied):.0%} of groups have tied rewards and teach nothing"
    evidence: dict[str, Any] = {"tied": fmean(tied)}
    passed = failed = 0.0
    if seen["groups/all_pass"].count:  # only where it is known which scores are right
        passed, failed = (fmean(seen[f"groups/all_{end}"].last(window)) for end in ("pass", "fail"))
        sentence += f" ({passed:.0%} all right, {failed:.0%} all wrong)"
        evidence |= {"all_pass": passed, "all_fail": failed}
    if passed > 0.5 or _rests_at_its_highest(seen, window):
        return seen.alert(
            "dead_groups", "info", sentence, ("the prompts are solved: take harder ones, or stop here",), **evidence
        )
    too_hard = (
        "the prompts are too hard for this model: take easier ones, or more num_generations",
        "test the reward on a right answer: a parser that never matches looks just like this",
    )
    alike = ("the reward gives the same value to all: check what it returns", "raise temperature while sampling")
    return seen.alert(
        "dead_groups", "warning", *blamed(seen, sentence, too_hard if failed > 0.5 else alike), **evidence
    )


def _rests_at_its_highest(seen: History, window: int) -> bool:
    reward, moved = seen["reward"], since_start(seen["reward"], window)
    earlier = seen["frac_reward_zero_std"].last(2 * window)[:window]
    if seen["groups/all_pass"].count or moved is None or moved.z < 2.5 or fmean(earlier) < 0.5:
        return False
    return median(reward.last(window)) >= max(*reward.first, *reward.recent)


def _rewards(seen: History) -> dict[str, Any]:
    reward = seen["reward"]
    if reward.count < 10:
        return {}
    return {"reward_start": fmean(reward.start(10)), "reward_now": fmean(reward.last(10))}


def router_drift(
    seen: History, *, fall: float = 0.7, others: float = 0.3, apart: float = 0.3, window: int = 5
) -> Alert | None:
    """`router_drift`: some layer's experts share the load less evenly than at the start, or `apart` of the choices differ.

    Less evenly: the entropy of the load falls to `fall` of its start, or the share of tokens that pass by the busiest expert to
    `others` of its start. The entropy is that of the layer with the lowest, over log E. Differences are measured with
    `router_replay='R3'`, which records the sampler's choices.
    """
    entropy = seen["experts/entropy"]
    last = entropy.last(window)
    if len(last) < window:
        return None
    start = fmean(entropy.start(window))
    changed = fmean(seen["experts/changed"].last(window) or [0.0])
    loads = seen["experts/max_load"]
    load, before = fmean(loads.last(window)), fmean(loads.start(window))
    evidence = {"entropy": fmean(last), "entropy_at_start": start, "max_load": load, "changed": changed}
    alerts = []
    if fmean(last) <= fall * start or 1 - load <= others * (1 - before):
        sentence = (
            f"in some layer {load:.0%} of the tokens go to one expert, {before:.0%} at the start; the entropy of the load went from "
            f"{start:.2f} to {fmean(last):.2f}"
        )
        advice = (
            "give the load-balancing loss a weight (router_aux_loss_coef=0.001 or more)",
            "lower learning_rate, or leave the router out of the adapter",
        )
        alerts.append(seen.alert("router_drift", "warning", sentence, advice, parts="load", **evidence))
    if changed >= apart:
        sentence = f"{changed:.0%} of the learner's choices of experts are not the sampler's"
        advice = (
            "use completions for fewer steps (steps_per_generation, num_iterations), or with less staleness",
            "lower learning_rate; sample in the learner's precision (rollout_dtype)",
        )
        alerts.append(seen.alert("router_drift", "warning", sentence, advice, parts="choices", **evidence))
    return together(alerts)


def tool_collapse(
    seen: History, *, loops: float = 0.3, failures: float = 0.9, window: int = 5, patient: int = 20
) -> Alert | None:
    """`tool_collapse`: over `window` steps no tool is called, the same call is made over and over, or nearly every call fails.

    Never called: in `patient` steps from the start of the run, or in `window` steps after it had been called. A completion loops when
    it makes one call with the same arguments three times or more.
    """
    calls = seen["tools/call_frequency"]
    last = calls.last(window)
    if len(last) < window:
        return None
    failed, looping = fmean(seen["tools/failure_frequency"].last(window) or [0.0]), seen["tools/looping"]
    repeated = fmean(looping.last(window) or [0.0])
    evidence = {"calls_per_completion": fmean(last), "failed": failed, "looping": repeated}
    if max(last) == 0.0:
        was_called = sum(calls.start(window)) > 0
        if not was_called and calls.count < patient:
            return None
        sentence = "tools are no longer called" if was_called else f"no tool was called in {calls.count} steps"
        advice: tuple[str, ...] = (
            "show in the prompt when a tool helps, or teach a few calls first (covey sft); GRPO cannot find what is never drawn",
            "raise the temperature, or num_generations, so that some completions call a tool",
            "see whether answers without a tool earn as much",
        )
        return seen.alert("tool_collapse", "warning", sentence, advice, **evidence)
    alerts = []
    if repeated >= loops:
        sentence = f"{repeated:.0%} of completions make the same call three times or more"
        advice = (
            "look at such a conversation in covey view: a tool may answer with nothing new",
            "bound the calls: max_tool_calling_iterations, or let the reward charge for calls",
        )
        alerts.append(seen.alert("tool_collapse", "warning", sentence, advice, parts="repeated calls", **evidence))
    if failed >= failures:
        sentence = f"{failed:.0%} of the calls of tools fail"
        advice = (
            "read the errors in covey view: arguments of another form, or a tool that is down",
            "say in the tool's docstring what its arguments look like",
        )
        alerts.append(seen.alert("tool_collapse", "warning", sentence, advice, parts="failed calls", **evidence))
    return together(alerts)
