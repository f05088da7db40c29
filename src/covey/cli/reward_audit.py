"""`covey reward audit RUN`: how often a reward disagrees with itself or with another verifier, and what that costs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.export import steps_of
from covey.cli.fields import other_flags
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Verb
from covey.errors import ConfigError
from covey.runs.upkeep import expect_folder

if TYPE_CHECKING:
    from covey.doctor.reward_audit.consistency import Comparison, Repeats

_FLAGS = (
    Flag(name="run", help="Folder of a run with rollouts.", group="what"),
    Flag(name="reward", help="Rewards to call again; left out: those of the run. May be repeated.", type="list[str]", group="reward"),
    Flag(name="against", help="Another verifier of the same texts: a built-in name, file.py:function, a judge. May be repeated.", type="list[str]", group="reward"),
    Flag(name="repeats", help="How often each reward is called again.", type=int, default=2, least=1, group="reward"),
    Flag(name="sample", help="Completions at most, whole groups from all over the steps.", type=int, default=512, least=2, group="what"),
    Flag(name="steps", help="Only these steps, as FIRST:LAST; one end may be left out.", group="what"),
    Flag(name="timeout", help="Seconds that one call may take.", type=float, default=60.0, group="reward"),
    Flag(name="trust_source", help="Run the run's own reward code, even if it has changed since.", type=bool, default=False, group="reward"),
    JSON,
)  # fmt: skip


def run(options: dict[str, Any]) -> int:
    """Score the run's completions again and say what the verdicts are worth."""
    folder = Path(options["run"]).expanduser()
    expect_folder(folder)
    rewards = options["reward"] or _rewards_of(folder, options)
    import numpy as np

    from covey.doctor.reward_audit import consistency
    from covey.rewards.builtin.registry import resolve

    groups, recorded = consistency.recorded_groups(folder, steps_of(options["steps"]), options["sample"])
    specs, others = [resolve(reward) for reward in rewards], [resolve(reward) for reward in options["against"] or []]
    count = sum(group.size for group in groups)
    output.say(f"{count} completions of {len(groups)} groups, scored {options['repeats']} times ...")
    scores = consistency.scored_again(groups, specs, options["repeats"], options["timeout"])
    repeats, compared = [], []
    for r, spec in enumerate(specs):
        mine = [group_scores[:, :, r] for group_scores in scores]
        if spec.name in recorded:
            at = recorded.index(spec.name)
            first = [consistency.scores_of(group)[None, :, at] for group in groups]
            mine = [np.concatenate(both) for both in zip(first, mine, strict=True)]
        if mine[0].shape[0] > 1:
            repeats.append(consistency.repeats_of(spec.name, groups, mine))
        for other in others:
            theirs = consistency.scored_again(groups, [other], 1, options["timeout"])
            firsts = [group_scores[0] for group_scores in mine], [group_scores[0, :, 0] for group_scores in theirs]
            compared.append(consistency.compare(spec.name, other.name, groups, *firsts))
    if options["json"]:
        output.result_json({"completions": count, "groups": len(groups), "repeats": [{**asdict(repeat), "cost": repeat.cost} for repeat in repeats],
                            "against": [{**asdict(pair), "kept": pair.retained} for pair in compared]})  # fmt: skip
        return 0
    for repeat in repeats:
        _show_repeats(repeat)
    for pair in compared:
        _show_comparison(pair)
    return 0


def _rewards_of(folder: Path, options: dict[str, Any]) -> list[Any]:
    from covey.cli import rerun, train

    flags, types = [*other_flags(), *train.flags()], train.flag_types()
    chosen = {"from_run": str(folder), "trust_source": options["trust_source"]}
    run_options = rerun.repeated(chosen, flags, types, verb="covey reward audit")
    rewards = run_options.get("reward")
    if not rewards:
        raise ConfigError(f"run.json of {folder} names no rewards that can be asked again; give them with --reward.")
    return list(rewards) if isinstance(rewards, list) else [rewards]


def _percent(estimate: Any) -> str:
    return f"{100 * estimate.value:.1f}% (95%: {100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def _show_repeats(repeats: Repeats) -> None:
    is_noisy = repeats.differ.value > 0
    sentence = f"{_percent(repeats.differ)} of the completions get another score when they are scored again"
    output.row("WARN" if is_noisy else "OK  ", repeats.name, sentence if is_noisy else "the same scores again")
    if repeats.unscored:
        _more(f"{repeats.unscored} completions had no score in some scoring and are left out")
    if not is_noisy:
        return
    if repeats.reliability.value == repeats.reliability.value:
        cost = (
            "no number of completions gives a signal"
            if repeats.reliability.value == 0
            else f"the same signal needs {repeats.cost:.2f} times the completions"
        )
        _more(f"reliability within groups {_percent(repeats.reliability)}: {cost}")
    _more(
        f"{_percent(repeats.woken)} of the groups are tied in one scoring and not in another: their advantages are noise"
    )
    _show_examples(repeats.examples)


def _show_comparison(comparison: Comparison) -> None:
    sentence = f"{_percent(comparison.differ)} of the verdicts differ from {comparison.other}'s"
    output.row("WARN" if comparison.differ.value > 0 else "OK  ", comparison.name, sentence)
    _more(
        f"pays {_percent(comparison.paid_wrong)} of what {comparison.other} rejects, rejects {_percent(comparison.missed)} of what it pays"
    )
    effect = f"if {comparison.other} is right, the advantages keep {100 * comparison.retained:.0f}% of their size"
    _more(f"{effect}; their cosine within groups is {comparison.agreement:.2f}")
    _show_examples(comparison.examples)


def _show_examples(examples: Any) -> None:
    for prompt, completion, scores in examples:
        shown = " / ".join(f"{score:g}" for score in scores)
        _more(f"{shown}: {_short(prompt)} -> {_short(completion)}")


def _more(sentence: str) -> None:
    output.row("    ", "", sentence)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:28] + " ... " + line[-27:]


verb = Verb(
    name="reward audit",
    usage="RUN [--reward REWARD] [--against VERIFIER] [options]",
    sentence="Scores a run's completions again, and says how often verdicts differ and what that costs.",
    examples=(
        "covey reward audit runs/train-1",
        "covey reward audit runs/train-1 --against math --sample 200",
    ),
    positional=("run",),
    needs={"run": "a run: covey reward audit runs/train-1."},
    flags=lambda: _FLAGS,
    run=run,
)
