"""`--ensemble` of `covey train` and `covey eval`: the members as text, and several models evaluated as one."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from covey.cli import output
from covey.cli.flags import spelled
from covey.errors import ConfigError


def ensemble_of(args: Mapping[str, Any]) -> Any:
    """The `Ensemble` of the flags, None without one. Raises ConfigError for options without members."""
    options = {name: args.get(f"ensemble_{name}") for name in ("max_share", "threshold")}
    settings = {name: value for name, value in options.items() if value is not None}
    if not args.get("ensemble"):
        if settings:
            raise ConfigError(f"{spelled(f'ensemble_{next(iter(settings))}')} belongs to --ensemble.")
        return None
    from covey.ensembles import Ensemble

    return Ensemble(list(args["ensemble"]), **settings)


def refuse_bad_ensemble(args: Mapping[str, Any], config: Any) -> None:
    """Raise for members that are not there or too many, before any data is read."""
    ensemble = ensemble_of(args)
    if ensemble is not None:
        ensemble.refuse_share(config.num_generations)


def evaluate(options: Mapping[str, Any]) -> None:
    """Answer every prompt with all members, vote, and print the accuracies of the vote and of each member."""
    from covey.cli.columns import evaluated_dataset
    from covey.ensembles import Ensemble
    from covey.ensembles.answers import candidates_of, choose, expect_vote
    from covey.rewards import Scorer
    from covey.rollout import SamplingParams

    vote: Any = options["vote"] or ("majority" if options["judge"] is None else "best")
    expect_vote(vote, options["judge"] is not None)
    ensemble = Ensemble([options["model"], *options["ensemble"]])
    dataset = evaluated_dataset(options)
    prompts = prompts_of(dataset)
    with closing(Scorer.of(options["reward"], options["reward_weights"])) as scorer:
        scorer.check(dataset.column_names)
        output.say(f"{', '.join(ensemble.names)}: {len(prompts)} prompts, {ensemble.samples} drawn answers each ...")
        sampling = SamplingParams(
            max_tokens=options["max_tokens"],
            temperature=options["temperature"],
            top_p=options["top_p"],
            seed=options["seed"],
        )
        groups = ensemble.groups(prompts, sampling)
        rewards = ensemble.scores(groups, scorer)
    judged = ensemble.scores(groups, options["judge"])
    picks = [choose(candidates_of(g, row), vote)[0] for g, row in zip(groups, judged, strict=True)]
    voted = [row[i] for row, i in zip(rewards, picks, strict=True)]
    alone = {
        name: [
            [x for completion, x in zip(group.completions, row, strict=True) if completion.source == name]
            for group, row in zip(groups, rewards, strict=True)
        ]
        for name in ensemble.names
    }
    _report(options, vote, voted, alone)


def prompts_of(dataset: Any) -> list[Any]:
    """The rows as prompts without tokens: each member has its own."""
    from covey.data.prompts import check_prompt
    from covey.data.rendering import as_written, clean
    from covey.types import Prompt

    prompts = []
    for i, row in enumerate(dataset):
        row = as_written(row, dataset.features)
        value = row["prompt"]
        check_prompt(value, f"row {i} of the data set")
        columns = {name: column for name, column in row.items() if name != "prompt"}
        text = value if isinstance(value, str) else None
        messages = None if text is not None else tuple(clean(message) for message in value)
        prompts.append(Prompt(uid=f"0:{i}", token_ids=(), text=text, messages=messages, columns=columns))
    return prompts


def _report(
    options: Mapping[str, Any], vote: str, voted: Sequence[float], alone: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    from covey.evaluation.intervals import bounded_mean, paired_difference, proportion
    from covey.types import reaches

    rights = lambda row: [float(reaches(x, options["threshold"])) for x in row]
    right = rights(voted)
    ensemble = proportion(int(sum(right)), len(right))
    shares = {name: [_share(rights(row)) for row in rows] for name, rows in alone.items()}
    members = {name: bounded_mean(values) for name, values in shares.items()}
    best = max(members, key=lambda name: members[name].value)
    difference = paired_difference(shares[best], right)
    if options["json"]:
        interval = lambda e: {"accuracy": round(e.value, 6), "accuracy_interval": [round(e.low, 6), round(e.high, 6)]}
        output.result_json(
            {
                "dataset": options["dataset"],
                "prompts": len(voted),
                "vote": vote,
                "ensemble": interval(ensemble),
                "members": {name: interval(estimate) for name, estimate in members.items()},
                "difference": {
                    "of": "ensemble", "minus": best, "value": difference.value, "low": difference.low,
                    "high": difference.high, "p_value": difference.p_value,
                },
            }
        )  # fmt: skip
        return
    output.result(f"vote {vote} on {options['dataset']} ({len(voted)} prompts)")
    for name, estimate in (("ensemble", ensemble), *members.items()):
        value, low, high = (100 * x for x in (estimate.value, estimate.low, estimate.high))
        output.result(f"  {name:<24} {value:7.3f}%  (95% {low:.3f} to {high:.3f})")
    output.result(f"accuracy of the ensemble minus that of {best}: {difference.in_words('points', 100.0)}")


def _share(right: Sequence[float]) -> float:
    """Share of a member's answers to a prompt that are right; 0 where it gave none."""
    return sum(right) / len(right) if right else 0.0
