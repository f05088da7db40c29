"""Choice of the algorithm of a run, and of the languages that share a group, from its options."""

import inspect
import logging
from typing import Any

from covey import algorithms as alg
from covey.algorithms import Algorithm
from covey.algorithms.teachers import is_address
from covey.config import GRPOConfig
from covey.config.options import ALGORITHM_OPTIONS
from covey.data.checks import row_at
from covey.data.hints import NO_AGENT, NO_MEDIA, text_of_feedback
from covey.data.media import has_media
from covey.data.together import columns_of, refuse_missing_languages
from covey.errors import ConfigError, did_you_mean
from covey.monitor import refuse_unknown_columns
from covey.rewards.builtin.chat_endpoint import expect_server
from covey.rewards.builtin.judge import Judge

logger = logging.getLogger(__name__)


def build_algorithm(args: GRPOConfig, algorithm: Any = None) -> Algorithm:
    """The algorithm named by `algorithm` or `args.algorithm`, else composed from TRL's loss options; with `args.target_kl`.

    Takes a name, an import path, a preset function or an Algorithm. Raises ConfigError for anything else.
    """
    built = _chosen(args, algorithm)
    if args.target_kl is None:
        return built
    if built.target_kl is not None:
        raise ConfigError(
            f"target_kl is {args.target_kl:g} in the options and {built.target_kl:g} in the algorithm; leave one out."
        )
    return built.replace(target_kl=args.target_kl)


def _chosen(args: GRPOConfig, algorithm: Any) -> Algorithm:
    chosen = args.algorithm if algorithm is None else algorithm
    if isinstance(chosen, str):
        chosen = alg.from_name(chosen)
    if callable(chosen) and not isinstance(chosen, Algorithm):
        chosen = chosen()
    if isinstance(chosen, Algorithm):
        refuse_small_groups(chosen, args.num_generations)
        return chosen
    if chosen is not None:
        raise ConfigError(
            f"algorithm={chosen!r} is neither a name, nor an import path, nor a covey.algorithms.Algorithm."
        )
    return alg.from_options(**_loss_options(args))


def _loss_options(args: GRPOConfig) -> dict[str, Any]:
    parameters = inspect.signature(alg.from_options).parameters
    return {name: getattr(args, name) for name in parameters if hasattr(args, name)}


def name_idle_losses(args: GRPOConfig) -> None:
    """Warn of each option of the loss that is set and changes nothing: without it the options give an equal algorithm."""
    options, changed = _loss_options(args), args._changed()
    composed = alg.from_options(**options)
    for name in (name for name in ALGORITHM_OPTIONS if name in options and name in changed):
        if alg.from_options(**{**options, name: getattr(type(args), name)}) == composed:
            logger.warning(
                "%s=%r changes nothing here: with loss_type=%r and the other options no part of the loss reads it.",
                name, options[name], args.loss_type,
            )  # fmt: skip


def choose_algorithm(args: GRPOConfig, algorithm: Any) -> Algorithm:
    """The constructor's `algorithm`, under the rules of the option of that name; None: the algorithm of the options."""
    if algorithm is None:
        if args.algorithm is None:
            name_idle_losses(args)
        return build_algorithm(args)
    if args.algorithm is not None:
        raise ConfigError("algorithm is given to GRPOTrainer and in GRPOConfig; keep one of them.")
    changed = sorted(set(args._changed()) & set(ALGORITHM_OPTIONS))
    if changed:
        raise ConfigError(
            f"algorithm= and {', '.join(changed)} both say what the loss is; put the values into the algorithm, "
            "such as alg.grpo(...).replace(...), and drop the options."
        )
    return build_algorithm(args, algorithm)


def refuse_small_groups(algorithm: Algorithm, num_generations: int) -> None:
    """Raise ConfigError if the advantage needs more completions per prompt (`least_group`) than a group has."""
    least = getattr(algorithm.advantage, "least_group", 1)
    if num_generations < least:
        raise ConfigError(
            f"{type(algorithm.advantage).__name__} needs at least {least} completions a prompt, and num_generations is "
            f"{num_generations}; raise it, or give the advantage a smaller number."
        )


def check_columns(args: Any, dataset: Any, agents: Any, scorer: Any, algorithm: Algorithm) -> None:
    """Raise CoveyError if the training set lacks a column needed by a reward, a slice, the advantage or `group_languages`.

    So for a part that learns from the answers of tools and environments, without any.
    """
    if dataset is None:
        return
    if algorithm.needs.observed and not agents.are_used:
        raise ConfigError(
            "The algorithm learns from the answers of tools and environments (Echo), and this run has none; give tools, an environment or "
            "an agent, or leave it out."
        )
    columns = dataset.column_names
    refuse_unknown_columns(args, columns)
    if args.group_languages and columns is not None:
        refuse_missing_languages(columns, args.group_languages)
        columns = columns_of(columns, args.group_languages)
    scorer.check(agents.columns(columns))
    check_advantage(algorithm.advantage, columns, dataset)


def check_advantage(advantage: Any, columns: Any, dataset: Any) -> None:
    """Raise ConfigError for an advantage by a column that is not there, or that names no role in one of the first rows."""
    column = getattr(advantage, "column", None)
    if column is None or columns is None:
        return
    if column not in columns:
        raise ConfigError(
            f"The advantage is by the column {column!r}, and the data set has {', '.join(columns)}."
            f"{did_you_mean(column, columns)}"
        )
    while hasattr(advantage, "advantage"):
        advantage = advantage.advantage
    count = min(LOOKED_AT, len(dataset)) if hasattr(dataset, "__len__") else 0
    if isinstance(advantage, alg.RoleConditioned):
        for index in range(count):
            if row_at(dataset, index).get(column) in (None, ""):
                raise ConfigError(
                    f"train_dataset, row {index}, names no role: its column {column!r} is empty; fill it."
                )


LOOKED_AT = 256
"""First rows of a data set in which a teacher's columns are looked at."""


def check_teacher(role: Any, dataset: Any, *, has_agent: bool = False) -> None:
    """Raise ConfigError for feedback without text, or with an agent, and for a column `by` that chooses none of the teachers."""
    if role is not None and role.feedback and has_agent:
        raise ConfigError(NO_AGENT)
    columns = getattr(dataset, "column_names", None)
    if role is None or columns is None:
        return
    count = min(LOOKED_AT, len(dataset)) if hasattr(dataset, "__len__") else 0
    rows = [row_at(dataset, index) for index in range(count)]
    if role.feedback and any(has_media(row) for row in rows):
        raise ConfigError(NO_MEDIA)
    if role.feedback in columns and rows:
        values = [row[role.feedback] for row in rows]
        if not any(text_of_feedback(value, role.feedback) for value in values):
            raise ConfigError(
                f"The teacher's feedback={role.feedback!r} has no text in the first {count} rows of the data set, so it would teach "
                "nothing; name a column with text."
            )
    if role.by is None:
        return
    if role.by not in columns:
        raise ConfigError(f"by={role.by!r} is no column of the data set, which has {', '.join(columns)}.")
    there, teachers = {str(row[role.by]) for row in rows}, {str(value) for value in role.teacher}
    if rows and not there & teachers:
        raise ConfigError(
            f"No teacher is for a value of the column {role.by!r}: it holds {', '.join(sorted(there)[:5])}, and there are teachers for "
            f"{', '.join(sorted(teachers)[:5])}."
        )


def expect_servers(rewards: Any, role: Any, ensemble: Any, seconds: float) -> None:
    """Wait up to `seconds` for each server of a judge, a teacher or a member of the ensemble. Raises CoveyError for one that is not there.

    A teacher with `when_lost="skip"` may come later.
    """
    calls = [getattr(spec.call, "judge", None) for spec in rewards]
    judges = {judge.endpoint.url: "judge" for judge in calls if isinstance(judge, Judge)}
    shares = role.shares() if role is not None and role.when_lost == "stop" else []
    teachers = {source: "teacher" for source, _, _ in shares if is_address(source)}
    named = [] if ensemble is None else zip(ensemble.names, ensemble.members, strict=True)
    members = {member.model: f"ensemble member {name}" for name, member in named if member.is_endpoint}
    for url, called in {**judges, **teachers, **members}.items():
        expect_server(url, called, seconds)


def languages_of(args: Any, algorithm: Any) -> tuple[str, ...]:
    """The languages that share a group, () for none. Raises ConfigError for incompatible options."""
    languages = tuple(args.group_languages or ())
    if not languages:
        return ()
    count = len(languages)
    if count < 2 or len(set(languages)) < count:
        raise ConfigError(f"group_languages={list(languages)} must name at least two languages, each once.")
    if args.num_generations % count:
        near = max(count, args.num_generations // count * count)
        raise ConfigError(
            f"num_generations={args.num_generations} completions do not share out among {count} languages; take {near} or {near + count}."
        )
    for name, is_set in (
        ("dynamic_sampling", args.dynamic_sampling),
        ("advantage_slices", args.advantage_slices),
        ("an algorithm that needs a greedy answer", algorithm.needs.greedy),
    ):
        if is_set:
            raise ConfigError(
                f"group_languages judges a question over its languages, which {name} does not; leave one out."
            )
    return languages
