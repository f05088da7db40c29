"""Combinations of features that are refused: one table, which every check asks and docs/combinations.md is written from."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from covey.errors import ConfigError

FEATURES = {
    "DDP": "several learner processes, each with the whole model",
    "FSDP2": "several learner processes that share the model (`fsdp`, `deepspeed`)",
    "context parallel": "processes that share out the tokens of each row (`parallelism_config` with `cp_size`)",
    "LoRA": "an adapter on a frozen base",
    "QLoRA": "an adapter on a base in 4 bits",
    "8-bit optimizer": "bitsandbytes' optimizers",
    "vLLM server": "`use_vllm` with `vllm_mode: server`",
    "vLLM in process": "`use_vllm` with `vllm_mode: colocate`",
    "transformers": "`rollout_backend: transformers`",
    "generate": "`generation_kwargs` that only transformers' `generate` has",
    "asynchronous": "`async_rollouts`, in processes or, with a server, in a thread",
    "media": "a model that reads images, sounds or videos, and prompts with them",
    "tools": "`tools`, of functions or of MCP servers",
    "environment": "`environment_factory`",
    "agent": "a loop of your own over the run's endpoint",
    "rollout_func": "a function that writes whole completions",
    "ensemble": "other models in the groups",
    "teacher": "`alg.distill` with a model in the process",
    "served teacher": "`alg.distill` with a model behind an endpoint",
    "examples": "`alg.sft` beside the rollouts",
    "critic": "PPO's critic, as a head or a model",
    "reference sync": "a KL term whose reference moves",
    "process rewards": "rewards for each step of a completion",
    "average": "`ema_decay` or `soup_steps`",
}
"""Features by name. None of them: one process, the native engine, synchronous, text, all weights trained."""
AXES = (
    ("DDP", "FSDP2"),
    ("LoRA", "QLoRA"),
    ("vLLM server", "vLLM in process", "transformers", "generate"),
    ("tools", "rollout_func", "agent"),
    ("environment", "rollout_func", "agent"),
    ("teacher", "served teacher"),
)
"""Features of which a run has one at most."""


@dataclass(frozen=True)
class Refusal:
    """A combination that is refused."""

    features: frozenset[str]
    why: str
    """One sentence: the reason, and what to do instead."""
    unless: frozenset[str] = frozenset()
    """Features with any of which it runs all the same."""
    at_once: str = ""
    """A condition on an option, as the page writes it; empty: the features alone are refused."""

    def covers(self, features: Collection[str]) -> bool:
        return self.features <= set(features) and not self.unless & set(features)


def _refusal(features: Iterable[str], why: str, unless: Iterable[str] = (), at_once: str = "") -> Refusal:
    return Refusal(frozenset(features), why, frozenset(unless), at_once)


_UNSCORED = (
    "an agent's calls are recorded with their log-probabilities, which completions of transformers' generate do not have; leave those "
    "generation_kwargs out."
)
REFUSALS = (
    _refusal(
        ("FSDP2", "rollout_func"),
        "rollout_func is handed a trainer whose model fsdp has split, which cannot generate; leave one of them out, or use tools or "
        "environment_factory.",
    ),
    _refusal(("agent", "generate"), _UNSCORED),
    _refusal(
        ("media", "served teacher"),
        "A teacher at an endpoint reads token ids, not images or sounds; load it here (a folder or a hub id).",
    ),
    _refusal(
        ("ensemble", "rollout_func"),
        "a rollout_func writes whole completions itself, with the trainer and its model, so another model has nothing to write them with; "
        "leave ensemble out, or use tools or environment_factory.",
    ),
    _refusal(
        ("asynchronous", "rollout_func"),
        "rollout_func is handed the trainer, whose weights the learner changes while rollouts run ahead; leave async_rollouts out, or use "
        "tools or environment_factory.",
    ),
    _refusal(
        ("asynchronous", "generate"),
        "generation_kwargs that only transformers' generate knows give no log-probabilities, so staleness could not be corrected; leave "
        "them out, or set max_staleness=0.",
        at_once="with staleness",
    ),
)


def refusal_of(features: Collection[str]) -> Refusal | None:
    """The refusal of a combination; None: it runs. Raises KeyError for an unknown feature."""
    for feature in features:
        FEATURES[feature]
    return next((refusal for refusal in REFUSALS if refusal.covers(features)), None)


def expect_together(*features: str | bool | None) -> None:
    """Raise ConfigError for a combination that is refused; entries that are no names are skipped: `args.fsdp and "FSDP2"`."""
    refusal = refusal_of([feature for feature in features if isinstance(feature, str) and feature])
    if refusal is not None:
        raise ConfigError(refusal.why)


def features_of(args: Any) -> list[str]:
    """Features that the options of a run ask for."""
    several, is_vllm = args.world_size > 1, args.rollout_backend == "vllm"
    active = {
        "context parallel": args.context > 1,
        "FSDP2": several and args.sharding is not None,
        "DDP": several and args.sharding is None,
        "vLLM server": is_vllm and args.vllm_mode == "server",
        "vLLM in process": is_vllm and args.vllm_mode != "server",
        "transformers": args.rollout_backend == "transformers",
        "asynchronous": args.async_rollouts,
        "average": args.ema_decay is not None or args.soup_steps is not None,
    }
    return [name for name, acts in active.items() if acts]
