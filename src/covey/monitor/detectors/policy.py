"""Detectors for the policy: entropy, diversity, KL from its start, groups without signal, drifting routers."""

from dataclasses import dataclass
from statistics import fmean, median

from covey.monitor.detectors.blame import blamed
from covey.monitor.history import History, has_risen, logs, may_have_risen, shift, since_start, together
from covey.types import Alert

_FLATTER = (
    "lower learning_rate, or stop earlier",
    "clip higher (epsilon_high=0.28), or add an entropy bonus (entropy_coef, use_adaptive_entropy)",
    "raise temperature while sampling",
)


@dataclass(frozen=True)
class EntropyCollapse:
    """`entropy_collapse`: entropy is down to a fraction of its start, beyond noise, and the task is not solved: completions of a
    group are all but the same and their rewards tied, or the reward has not risen for it."""

    share: float = 0.2
    alike: float = 0.25
    """Distinct completions of a group, as a share."""
    tied: float = 0.9
    """Share of groups without signal. While others are left, alike completions are what learning one answer looks like."""
    window: int = 10
    z: float = 4.0

    def __call__(self, seen: History) -> Alert | None:
        entropy, unique = seen["entropy"], seen["diversity/unique"]
        if entropy.count < 2 * self.window:
            return None
        begun, now = median(entropy.start(self.window)), median(entropy.last(self.window))
        if not 0 <= now < self.share * begun:
            return None
        if shift(logs(entropy.start(self.window)), logs(entropy.last(self.window))).z > -self.z:
            return None
        distinct = fmean(unique.last(self.window)) if unique.count else 1.0
        before = fmean(unique.start(self.window)) if unique.count else 1.0
        is_solved = fmean(seen["groups/all_pass"].last(self.window) or [0.0]) > 0.5
        is_alike = distinct < self.alike and distinct < 0.5 * before
        has_no_signal = fmean(seen["frac_reward_zero_std"].last(self.window) or [0.0]) >= self.tied
        if is_solved or (may_have_risen(seen) and not (is_alike and has_no_signal)):
            return None
        sentence = f"entropy fell from {begun:.3g} to {now:.3g} nats a token; of a group's completions {distinct:.0%} are distinct"
        return seen.alert(
            "entropy_collapse", "warning", sentence, _FLATTER,
            entropy_start=begun, entropy_now=now, distinct_completions=distinct, **_rewards(seen),
        )  # fmt: skip


@dataclass(frozen=True)
class EntropyExplosion:
    """`entropy_explosion`: entropy is far above its start: the policy turns to noise."""

    times: float = 3.0
    at_least: float = 0.5
    """Nats that it must have gained."""
    gain: float = 1.0
    """Nats that are enough from any start: e times as many choices a token, where three times the entropy may be more than there is."""
    window: int = 5
    z: float = 4.0

    def __call__(self, seen: History) -> Alert | None:
        entropy = seen["entropy"]
        if entropy.count < 3 * self.window:
            return None
        begun, now = median(entropy.start(10)), median(entropy.last(self.window))
        has_multiplied = now >= self.times * begun and now >= begun + self.at_least
        if not (has_multiplied or now >= begun + self.gain) or has_risen(seen):
            return None
        if shift(entropy.start(10), entropy.last(self.window)).z < self.z:
            return None
        sentence, advice = blamed(
            seen,
            f"entropy rose from {begun:.3g} to {now:.3g} nats a token: completions turn to noise",
            ("lower learning_rate", "lower entropy_coef", "go back to an earlier checkpoint"),
        )
        return seen.alert(
            "entropy_explosion", "error", sentence, advice,
            entropy_start=begun, entropy_now=now, **_rewards(seen),
        )  # fmt: skip


@dataclass(frozen=True)
class DiversityLoss:
    """`diversity_loss`: completions of a group have become alike, and the reward does not explain it."""

    share: float = 0.5
    window: int = 10

    def __call__(self, seen: History) -> Alert | None:
        unique = seen["diversity/unique"]
        if unique.count < 2 * self.window:
            return None
        moved = shift(unique.start(self.window), unique.last(self.window))
        is_solved = fmean(seen["groups/all_pass"].last(self.window) or [0.0]) > 0.5
        if moved.after > self.share * moved.before or moved.z > -4 or is_solved or may_have_risen(seen):
            return None
        sentence = f"of a group's completions {moved.after:.0%} are distinct, {moved.before:.0%} at the start, and the reward has not risen"
        return seen.alert(
            "diversity_loss", "warning", sentence, _FLATTER,
            distinct_start=moved.before, distinct_now=moved.after, z=moved.z, **_rewards(seen),
        )  # fmt: skip


@dataclass(frozen=True)
class KLRunaway:
    """`kl_runaway`: the distance to the reference is large, and growing by multiples.

    Single steps may jump by a hundred times, so the latest five must all be above the twenty before: were all 25 drawn alike, that
    would be so once in C(25, 5) = 53,130 looks, whatever their distribution (a rank test, Wilcoxon 1945).
    """

    high: float = 0.5
    """Nats a token that no useful policy needs while it is still growing."""
    times: float = 3.0

    def __call__(self, seen: History) -> Alert | None:
        series = seen["kl"]
        earlier = series.last(25)[:-5]
        if not earlier:
            return None
        before, now = median(earlier), median(series.last(5))
        if now < self.high or now < self.times * before or min(series.last(5)) < max(earlier):
            return None
        sentence, advice = blamed(
            seen,
            f"the policy runs away from the reference: kl {before:.3g} to {now:.3g} nats a token",
            (
                "lower learning_rate, or raise beta",
                "go back to an earlier checkpoint: alert_actions={'kl_runaway': 'roll_back'} does it by itself",
                "look at the latest completions: a reward that pays for odd text pulls the policy away",
            ),
        )
        return seen.alert(
            "kl_runaway", "error", sentence, advice,
            kl_before=before, kl_now=now, **_rewards(seen),
        )  # fmt: skip


@dataclass(frozen=True)
class DeadGroups:
    """`dead_groups`: nearly all groups have tied rewards, so that a step has nearly no gradient.

    For information alone where the task is solved: most groups all right, or, of rewards that do not say what is right, a reward
    that has come to rest at its highest value by degrees. One that ties all groups from one step to the next is a fault.
    """

    share: float = 0.9
    window: int = 10

    def __call__(self, seen: History) -> Alert | None:
        tied = seen["frac_reward_zero_std"].last(self.window)
        if len(tied) < self.window or fmean(tied) < self.share:
            return None
        sentence, evidence = f"{fmean(tied):.0%} of groups have tied rewards and teach nothing", {"tied": fmean(tied)}
        passed = failed = 0.0
        if seen["groups/all_pass"].count:  # only where it is known which scores are right
            passed, failed = (fmean(seen[f"groups/all_{end}"].last(self.window)) for end in ("pass", "fail"))
            sentence += f" ({passed:.0%} all right, {failed:.0%} all wrong)"
            evidence |= {"all_pass": passed, "all_fail": failed}
        if passed > 0.5 or self._rests_at_its_highest(seen):
            return seen.alert(
                "dead_groups", "info", sentence, ("the prompts are solved: take harder ones, or stop here",), **evidence
            )
        advice: tuple[str, ...]
        if failed > 0.5:
            advice = (
                "the prompts are too hard for this model: take easier ones, or more num_generations",
                "test the reward on a right answer: a parser that never matches looks just like this",
            )
            sentence, advice = blamed(seen, sentence, advice)
            return seen.alert("dead_groups", "warning", sentence, advice, **evidence)
        advice = ("the reward gives the same value to all: check what it returns", "raise temperature while sampling")
        sentence, advice = blamed(seen, sentence, advice)
        return seen.alert("dead_groups", "warning", sentence, advice, **evidence)

    def _rests_at_its_highest(self, seen: History) -> bool:
        reward, moved = seen["reward"], since_start(seen["reward"], self.window)
        earlier = seen["frac_reward_zero_std"].last(2 * self.window)[: self.window]
        if seen["groups/all_pass"].count or moved is None or moved.z < 2.5 or fmean(earlier) < 0.5:
            return False
        return median(reward.last(self.window)) >= max(*reward.first, *reward.recent)


def _rewards(seen: History) -> dict[str, float]:
    reward = seen["reward"]
    if reward.count < 10:
        return {}
    return {"reward_start": fmean(reward.start(10)), "reward_now": fmean(reward.last(10))}


@dataclass(frozen=True)
class RouterDrift:
    """`router_drift`: some layer's experts share the load less evenly than at the start, or `changed` of the choices differ.

    Less evenly: the entropy of the load falls to `fall` of its start, or the share of tokens that pass by the busiest expert to
    `others` of its start. The entropy is that of the layer with the lowest, over log E. Differences are measured with
    `router_replay='R3'`, which records the sampler's choices.
    """

    fall: float = 0.7
    others: float = 0.3
    changed: float = 0.3
    window: int = 5

    def __call__(self, seen: History) -> Alert | None:
        entropy = seen["experts/entropy"]
        last = entropy.last(self.window)
        if len(last) < self.window:
            return None
        start = fmean(entropy.start(self.window))
        changed = fmean(seen["experts/changed"].last(self.window) or [0.0])
        loads = seen["experts/max_load"]
        load, before = fmean(loads.last(self.window)), fmean(loads.start(self.window))
        evidence = {"entropy": fmean(last), "entropy_at_start": start, "max_load": load, "changed": changed}
        alerts = []
        if fmean(last) <= self.fall * start or 1 - load <= self.others * (1 - before):
            sentence = (
                f"in some layer {load:.0%} of the tokens go to one expert, {before:.0%} at the start; the entropy of the load went from "
                f"{start:.2f} to {fmean(last):.2f}"
            )
            advice = (
                "give the load-balancing loss a weight (router_aux_loss_coef=0.001 or more)",
                "lower learning_rate, or leave the router out of the adapter",
            )
            alerts.append(seen.alert("router_drift", "warning", sentence, advice, parts="load", **evidence))
        if changed >= self.changed:
            sentence = f"{changed:.0%} of the learner's choices of experts are not the sampler's"
            advice = (
                "use completions for fewer steps (steps_per_generation, num_iterations), or with less staleness",
                "lower learning_rate; sample in the learner's precision (rollout_dtype)",
            )
            alerts.append(seen.alert("router_drift", "warning", sentence, advice, parts="choices", **evidence))
        return together(alerts)


@dataclass(frozen=True)
class ToolCollapse:
    """`tool_collapse`: over `window` steps no tool is called, the same call is made over and over, or nearly every call fails.

    Never called: in `patient` steps from the start of the run, or in `window` steps after it had been called. A completion loops when
    it makes one call with the same arguments three times or more.
    """

    loops: float = 0.3
    failures: float = 0.9
    window: int = 5
    patient: int = 20

    def __call__(self, seen: History) -> Alert | None:
        calls = seen["tools/call_frequency"]
        last = calls.last(self.window)
        if len(last) < self.window:
            return None
        failed, looping = fmean(seen["tools/failure_frequency"].last(self.window) or [0.0]), seen["tools/looping"]
        repeated = fmean(looping.last(self.window) or [0.0])
        evidence = {"calls_per_completion": fmean(last), "failed": failed, "looping": repeated}
        if max(last) == 0.0:
            was_called = sum(calls.start(self.window)) > 0
            if not was_called and calls.count < self.patient:
                return None
            sentence = "tools are no longer called" if was_called else f"no tool was called in {calls.count} steps"
            advice: tuple[str, ...] = (
                "show in the prompt when a tool helps, or teach a few calls first (covey sft); GRPO cannot find what is never drawn",
                "raise the temperature, or num_generations, so that some completions call a tool",
                "see whether answers without a tool earn as much",
            )
            return seen.alert("tool_collapse", "warning", sentence, advice, **evidence)
        alerts = []
        if repeated >= self.loops:
            sentence = f"{repeated:.0%} of completions make the same call three times or more"
            advice = (
                "look at such a conversation in covey view: a tool may answer with nothing new",
                "bound the calls: max_tool_calling_iterations, or let the reward charge for calls",
            )
            alerts.append(seen.alert("tool_collapse", "warning", sentence, advice, parts="repeated calls", **evidence))
        if failed >= self.failures:
            sentence = f"{failed:.0%} of the calls of tools fail"
            advice = (
                "read the errors in covey view: arguments of another form, or a tool that is down",
                "say in the tool's docstring what its arguments look like",
            )
            alerts.append(seen.alert("tool_collapse", "warning", sentence, advice, parts="failed calls", **evidence))
        return together(alerts)
