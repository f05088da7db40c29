"""Training signal of a first step: groups whose answers differ in reward, and answers that end by themselves."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from covey.doctor.finding import Finding, failed, passed, warned
from covey.doctor.trial import Trial
from covey.evaluation.intervals import proportion
from covey.types import Group
from covey.types.values import weighted_total

AREA = "signal"
_FEW = 0.2


def signal_findings(trial: Trial, weights: Tensor, *, max_tokens: int, masks_truncated: bool) -> Iterator[Finding]:
    """Findings on the sampled answers and on the update that was tried."""
    yield ends(trial.groups, max_tokens, masks_truncated)
    yield variety(trial.groups)
    yield carrying(trial.groups, weights)
    yield update(trial)
    yield agreement(trial)


def ends(groups: Sequence[Group], limit: int, masks_truncated: bool) -> Finding:
    """Finding on answers that end by themselves: end-of-text is generated, and the limit is long enough."""
    answers = [completion for group in groups for completion in group.completions]
    cut = sum(completion.finish == "length" for completion in answers)
    empty = sum(not completion.text.strip() for completion in answers)
    share = cut / len(answers)
    facts = {"cut": cut, "empty": empty, "answers": len(answers)}
    if cut == len(answers):
        sentence = (
            f"none of {len(answers)} answers ended within {limit} tokens: the end-of-text token was never generated."
        )
        fix = "raise --max-completion-length, or use a model that was trained to end its answers"
        if masks_truncated:
            return failed(AREA, sentence + " All of them are masked.", fix, **facts)
        return warned(AREA, sentence, fix, **facts)
    if share > 0.25:
        return warned(
            AREA,
            f"{cut} of {len(answers)} answers were cut at {limit} tokens.",
            "raise --max-completion-length",
            **facts,
        )
    if empty > 0.5 * len(answers):
        return warned(
            AREA,
            f"{empty} of {len(answers)} answers are empty.",
            "check the prompt's format and the chat template",
            **facts,
        )
    return passed(
        AREA, f"{len(answers) - cut} of {len(answers)} answers ended by themselves within {limit} tokens", **facts
    )


def variety(groups: Sequence[Group]) -> Finding:
    """WARN when most prompts get one and the same text as every answer."""
    alike = sum(len({completion.text for completion in group.completions}) == 1 for group in groups)
    different = sum(len({completion.text for completion in group.completions}) for group in groups)
    total = sum(group.size for group in groups)
    facts = {"alike": alike, "different": different, "answers": total}
    if 2 * alike > len(groups):
        sentence = f"{alike} of {len(groups)} prompts get the same answer every time, word for word."
        return warned(AREA, sentence, "raise --temperature; take --top-p, --top-k and --min-p back", **facts)
    return passed(AREA, f"{different} different texts in {total} answers to {len(groups)} prompts", **facts)


def carrying(groups: Sequence[Group], weights: Tensor) -> Finding:
    """The share of groups that would teach something at step 0, with Wilson's 95% interval over prompts."""
    alive = sum(teaches(group) for group in groups)
    share = proportion(alive, len(groups))
    rewards = [weighted_total(group.rewards, weights) for group in groups if group.rewards is not None]
    mean = float(torch.cat(rewards).nanmean())
    facts = {"share": share.value, "low": share.low, "high": share.high, "groups": len(groups), "mean_reward": mean}
    sentence = (
        f"{alive} of {len(groups)} groups would carry signal at step 0: {100 * share.value:.0f}% "
        f"(95% {100 * share.low:.0f} to {100 * share.high:.0f}), at a mean reward of {mean:.3g}"
    )
    fix = (
        "take prompts that the model answers right sometimes, a reward with steps between right and wrong, more "
        "--num-generations, or a supervised start"
    )
    if not alive:
        return failed(AREA, sentence + ".", fix, **facts)
    return warned(AREA, sentence + ".", fix, **facts) if share.value < _FEW else passed(AREA, sentence, **facts)


def teaches(group: Group) -> bool:
    """True if any of its answers has an advantage other than 0."""
    return group.advantages is not None and bool((group.advantages.nan_to_num(0.0).abs() > 1e-8).any())


def update(trial: Trial) -> Finding:
    """The update that was tried: its gradient is a number, and not 0 where there is signal."""
    norm = trial.report.metrics["grad_norm"].value if "grad_norm" in trial.report.metrics else math.nan
    if not math.isfinite(norm):
        fix = "lower --learning-rate, check the weights, use --bf16 rather than --fp16"
        return failed(AREA, "the gradient of a first step is not finite.", fix)
    if norm == 0 and any(map(teaches, trial.groups)):
        return failed(
            AREA,
            "the gradient of a first step is 0 although groups carry signal.",
            "check that some weights are trained, and the loss options",
        )
    return passed(AREA, f"a first step's gradient has norm {norm:.3g}", grad_norm=norm)


def agreement(trial: Trial) -> Finding:
    """WARN when sampler and learner give the same tokens different probabilities."""
    gap = trial.report.metrics.get("sampling/sampling_logp_difference/mean")
    mean = 0.0 if gap is None or not math.isfinite(gap.value) else gap.value
    if mean > 0.05:
        sentence = f"log-probabilities of sampler and learner differ by {mean:.3g} a token on average."
        return warned(
            AREA, sentence, "use --rollout-dtype float32, or an algorithm with a correction for it", difference=mean
        )
    return passed(AREA, f"log-probabilities of sampler and learner differ by {mean:.1g} a token", difference=mean)
