"""`covey env check`: an environment examined with random actions, before a run is paid for."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError

if TYPE_CHECKING:
    from covey.environments.check import EnvironmentReport

_FLAGS = (
    Flag(name="environment", help="file.py:Class, openenv:URL, gymnasium:ID or harbor:FOLDER.", group="what"),
    Flag(name="episodes", help="Episodes of random actions.", type=int, default=20, least=1, group="what"),
    Flag(name="turns", help="Most calls of one episode.", type=int, default=10, least=1, group="what"),
    Flag(name="seed", help="Seed of the episodes and of the actions.", type=int, default=0, group="what"),
    Flag(name="row", help="Columns that reset receives, as a JSON object.", group="what"),
    Flag(name="model", help="Model whose tokenizer and chat template count the tokens of an episode.", group="length"),
    JSON,
)


def run(options: Args) -> int:
    """Examine, print a table or JSON. Exit code 1 where something must be fixed."""
    from covey.environments.check import examine
    from covey.training.agents import environment

    row = _row(options["row"])
    report = examine(
        environment(options["environment"]),
        episodes=options["episodes"],
        turns=options["turns"],
        seed=options["seed"],
        row=row,
    )
    tokens = None if options["model"] is None else _tokens(report, options["model"])
    facts, problems = _facts(report, tokens), _problems(report, tokens)
    if options["json"]:
        output.result_json({"ok": not problems, "problems": problems, **facts})
    else:
        for name, value in facts.items():
            output.result(f"{name.replace('_', ' '):<28}{_format(value)}")
        for problem in problems:
            output.result(f"mend: {problem}")
    return 1 if problems else 0


def _row(text: str | None) -> dict[str, Any]:
    try:
        row = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--row {text!r} is no JSON ({error}); give an object such as '{{\"level\": 2}}'.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"--row is a {type(row).__name__}; give a JSON object of columns.")
    return row


def _facts(report: EnvironmentReport, tokens: tuple[int, int | None] | None) -> dict[str, Any]:
    median, largest = report.step_seconds
    calls = sum(len(walk.seconds) - 1 for walk in report.walks)
    facts: dict[str, Any] = {
        "episodes": len(report.walks),
        "calls": calls,
        "failed_calls": sum(len(walk.errors) for walk in report.walks),
        "reset_seconds": round(report.reset_seconds, 6),
        "step_seconds": None if math.isnan(median) else round(median, 6),
        "slowest_step_seconds": None if math.isnan(largest) else round(largest, 6),
        "same_under_a_seed": report.is_repeatable,
        "sessions_apart": report.are_apart,
        "left_after_close": dict(report.left),
        "random_episodes_that_score": round(report.scored, 4) if report.rewards else None,
        "random_reward_range": [min(report.rewards), max(report.rewards)] if report.rewards else None,
    }
    if tokens is not None:
        facts |= {"longest_episode_tokens": tokens[0], "context_tokens": tokens[1]}
    return facts


def _problems(report: EnvironmentReport, tokens: tuple[int, int | None] | None) -> list[str]:
    problems = []
    calls = sum(len(walk.seconds) - 1 for walk in report.walks)
    errors = [error for walk in report.walks for error in walk.errors]
    if not calls:
        problems.append("it has no tool that could be called; give it public methods with type hints and docstrings")
    elif len(errors) == calls:
        problems.append(f"every call failed ({errors[0]})")
    if not report.is_repeatable:
        problems.append(
            "the same seed and actions gave another episode; draw everything from the seed that reset receives"
        )
    if report.is_repeatable and not report.are_apart:
        problems.append(
            "two episodes at once disturb each other; keep state in the instance, not in the class or module"
        )
    if report.left:
        held = ", ".join(f"{count} {name}" for name, count in report.left.items())
        problems.append(f"close() left {held}; end what reset and the tools began")
    if report.rewards and min(report.rewards) == max(report.rewards) != 0:
        problems.append(f"every random episode earned {report.rewards[0]:g}; such a reward teaches nothing")
    if tokens is not None and tokens[1] is not None and tokens[0] > tokens[1]:
        problems.append(
            f"an episode has {tokens[0]} tokens and the model's context {tokens[1]}; use fewer turns or shorter answers"
        )
    return problems


def _tokens(report: EnvironmentReport, name: str) -> tuple[int, int | None]:
    """Tokens of the longest episode by the model's chat template, and the model's context."""
    from covey.models import config_of, load_tokenizer
    from covey.runs.weights import model_folder

    source = model_folder(name)
    tokenizer = load_tokenizer(None, source)
    if tokenizer.chat_template is None:
        raise ConfigError(f"The tokenizer of {name} has no chat template, so an episode's tokens cannot be counted.")
    longest = max(
        len(tokenizer.apply_chat_template(list(walk.messages), tokenize=True, return_dict=False))
        for walk in report.walks
    )
    context = getattr(config_of(source).get_text_config(), "max_position_embeddings", None)
    return longest, context


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "nothing"
    return "not measured" if value is None else str(value)


verb = Verb(
    name="env check",
    usage="ENVIRONMENT [options]",
    sentence="Examines an environment with random actions: time, determinism, sessions, rewards; exit code 1 where something must be fixed.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("environment",),
    needs={"environment": "an environment: covey env check games.py:Maze."},
    places={"model": "model folder"},
    examples=(
        "covey env check games.py:Maze",
        "covey env check openenv:http://localhost:8000 --episodes 50 --json",
        "covey env check gymnasium:FrozenLake-v1 --model Qwen/Qwen2.5-0.5B-Instruct",
    ),
)
