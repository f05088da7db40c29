"""Combinations that are refused, and options that are idle: two tables, which every check asks and docs/combinations.md is written from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from covey.errors import ConfigError

logger = logging.getLogger(__name__)

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
VARIANTS = {
    "CPU offload": "`fsdp_config` with `offload_params`, or `deepspeed` with an offload",
    "optimizer for whole tensors": "`optim` that is not known to work on parts of tensors, such as `adafactor`",
    "paged optimizer": "`optim` of bitsandbytes that pages its state",
    "optimizer object": "`optimizers=(...)` of the trainer",
    "device_map": "`model_init_kwargs` with a `device_map` over several devices",
    "router_replay": "`router_replay: R3`",
    "thinking budget": "`thinking_token_budget`",
    "tensor parallel": "`vllm_tensor_parallel_size` above 1",
    "separate critic": "`alg.ppo(critic_model='separate')`",
    "_calculate_rewards": "a trainer that overrides it",
    "other tokenizer": "a teacher whose tokenizer is not the policy's",
    "teaching adapter": "a teacher that is another adapter on the policy's base",
    "LoRA on the output layer": "an adapter that holds the output layer",
    "full-distribution KL": "a KL term over the whole vocabulary",
    "regular expression": "`vllm_structured_outputs_regex`, with evaluations",
    "several beams": "`generation_kwargs` with `num_beams`, and a prompt with several images or sounds",
    "sampler's environment": "a sampler of your own with `environment`, outside of a trainer",
}
"""Settings within features, and kinds of models, that other features refuse."""
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

    terms: tuple[str, ...]
    """Features and variants; of "environment or agent", either."""
    why: str
    """One sentence: the reason, and what to do instead. Words in braces are those of the run."""
    at_once: str = ""
    """A condition on an option, as the page writes it; empty: the features alone are refused."""

    @property
    def choices(self) -> list[list[str]]:
        """The names of each term."""
        return [term.split(" or ") for term in self.terms]

    def covers(self, features: Collection[str]) -> bool:
        return all(set(names) & set(features) for names in self.choices)


_SEVERAL = "DDP or FSDP2"
_UNSCORED = (
    "an agent's calls are recorded with their log-probabilities, which completions of transformers' generate do not have; leave those "
    "generation_kwargs out."
)
REFUSALS = (
    Refusal(
        ("FSDP2", "rollout_func"),
        "rollout_func is handed a trainer whose model fsdp has split, which cannot generate; leave one of them out, or use tools or "
        "environment_factory.",
    ),
    Refusal(("agent", "generate"), _UNSCORED),
    Refusal(
        ("media", "served teacher"),
        "A teacher at an endpoint reads token ids, not images or sounds; load it here (a folder or a hub id).",
    ),
    Refusal(
        ("ensemble", "rollout_func"),
        "a rollout_func writes whole completions itself, with the trainer and its model, so another model has nothing to write them with; "
        "leave ensemble out, or use tools or environment_factory.",
    ),
    Refusal(
        ("asynchronous", "rollout_func"),
        "rollout_func is handed the trainer, whose weights the learner changes while rollouts run ahead; leave async_rollouts out, or use "
        "tools or environment_factory.",
    ),
    Refusal(
        ("asynchronous", "generate"),
        "generation_kwargs that only transformers' generate knows give no log-probabilities, so staleness could not be corrected; leave "
        "them out, or set max_staleness=0.",
        at_once="with staleness",
    ),
    Refusal(
        ("asynchronous", _SEVERAL, "environment or agent", "ensemble"),
        "async_rollouts=True with environments or agents scores on the main process for all, and members of an ensemble act on every process; "
        "start one learner process, or leave ensemble out.",
    ),
    Refusal(
        ("asynchronous", _SEVERAL, "environment or agent", "_calculate_rewards"),
        "async_rollouts=True with environments or agents scores on the main process for all, and a trainer's _calculate_rewards is "
        "called by every process; start one learner process, or give reward_funcs instead.",
    ),
    Refusal(
        ("FSDP2", "device_map"),
        "device_map spreads the model over devices and fsdp over processes; leave one of them out.",
    ),
    Refusal(
        ("FSDP2", "optimizer object"),
        "fsdp replaces the parameters that the optimizer of optimizers=(...) was made for; leave it out, and set optim.",
    ),
    Refusal(
        ("FSDP2", "optimizer for whole tensors"),
        "optim={optim!r} cannot be honoured on a model that is split: it is not known to work on parts of tensors. Use one of {others}.",
    ),
    Refusal(
        ("FSDP2", "CPU offload", "paged optimizer"),
        "optim={optim!r} pages its state between device and host memory, and fsdp's offload keeps it in host memory; take an optimizer that "
        "is not paged, or leave the offload out.",
    ),
    Refusal(
        ("router_replay", "agent or rollout_func"),
        "router_replay='R3' needs the experts of each token, which no {writer} gives; leave it out.",
    ),
    Refusal(
        ("router_replay", "transformers or generate"),
        "router_replay='R3' needs the experts of each token, which Covey's own engine and vLLM record and {writer} does not; leave one of them out.",
    ),
    Refusal(
        ("thinking budget", "agent or rollout_func"),
        "thinking_token_budget closes thoughts while the run's sampler writes, and an agent or a rollout_func asks for its own "
        "completions; leave it out, and bound their thoughts there.",
    ),
    Refusal(
        ("thinking budget", "regular expression"),
        "thinking_token_budget closes thoughts in the middle of a completion, where vllm_structured_outputs_regex would begin anew; leave "
        "one of them out.",
    ),
    Refusal(
        ("vLLM in process", "tensor parallel", _SEVERAL),
        "vllm_tensor_parallel_size={size} with {processes} processes: each has an engine on its own device, and the devices of others are "
        "taken; leave it out, or start a server (vllm_mode='server').",
    ),
    Refusal(
        ("generate", "sampler's environment"),
        "generation_kwargs has {names}, which only transformers' generate knows, and it cannot call tools; leave one of them out.",
    ),
    Refusal(
        ("media", "generate", "several beams"),
        "prompt {uid} has {count} images or sounds, which transformers' generate would give to other beams than their own; leave num_beams "
        "out of generation_kwargs.",
    ),
    Refusal(
        ("media", "separate critic"),
        "A separate critic is the language model alone, which does not see images or sounds; use critic model='head'.",
    ),
    Refusal(
        ("QLoRA", "separate critic"),
        "A separate critic trains all its weights, which quantized ones do not allow; use critic model='head'.",
    ),
    Refusal(
        ("media", "teacher", "other tokenizer"),
        "The teacher {name} has another tokenizer ({difference}), so it reads text alone, and the policy reads images or sound; give a "
        "teacher with the policy's tokenizer.",
    ),
    Refusal(
        ("LoRA on the output layer", "teaching adapter"),
        "A teacher that is another adapter on the policy's base cannot be told apart with an adapter on the output layer; take that layer "
        "out of the adapter.",
    ),
    Refusal(
        ("vLLM server", "asynchronous", "average", "regular expression"),
        "Averaged weights are evaluated by Covey's own engine where a vLLM server writes ahead, and it knows no "
        "vllm_structured_outputs_regex; leave the regex, the average or async_rollouts out.",
    ),
    Refusal(
        ("LoRA on the output layer", "full-distribution KL"),
        "The full-distribution KL cannot be measured with an adapter on the output layer; use k3.",
    ),
)


@dataclass(frozen=True)
class Idle:
    """Options that change nothing in some runs, where they are accepted and named once."""

    options: tuple[str, ...]
    why: str
    idle_in: tuple[str, ...] = ()
    """Features, or settings as `name=value`. The options are idle in runs with any of these; empty: in all."""
    needs: tuple[str, ...] = ()
    """Nor are they idle in a run with any of these."""

    @property
    def is_of_options(self) -> bool:
        """True if the options of a run alone say whether it holds."""
        return not {*self.needs, *self.idle_in} & _OF_ARGUMENTS

    def covers(self, features: Collection[str], args: Any) -> bool:
        has = lambda names: any(_has(name, features, args) for name in names)
        return (not self.idle_in or has(self.idle_in)) and not has(self.needs)


def _has(name: str, features: Collection[str], args: Any) -> bool:
    option, is_setting, value = name.partition("=")
    return repr(getattr(args, option)) == value if is_setting else name in features


RECORDS = {
    "another distribution": "completions of top-k, top-p, min-p, a penalty or a regular expression",
    "no log-probabilities": "completions of transformers' `generate` alone",
    "live source": "prompts of a live source",
}
"""Kinds of completions and of prompts by which options are idle."""
_OF_ARGUMENTS = frozenset({"tools", "environment", "agent", "generate", *RECORDS})
_SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
    "vllm_transport", "vllm_directory", "vllm_attestation", "vllm_deadlines")  # fmt: skip
_COLOCATED = ("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_model_impl",
    "vllm_enable_sleep_mode")  # fmt: skip
_ROLLOUT = ("rollout_dtype", "rollout_max_rows")
_WORKERS = ("rollout_workers", "rollout_device", "rollout_placement")
_NATIVE = ("rollout_cache_fraction", "cuda_graphs", "attention")
_CORRECTION = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min")  # fmt: skip
_OF_VLLM = ("vLLM server", "vLLM in process")
IDLE = (
    Idle(("vllm_mode", *_SERVER, *_COLOCATED), "it acts with use_vllm=True", needs=_OF_VLLM),
    Idle(_SERVER, "it acts with vllm_mode='server'", needs=("vLLM server",)),
    Idle(_COLOCATED, "the server was started with its own", idle_in=("vLLM server",)),
    Idle(_ROLLOUT, "the server was started with its own", idle_in=("vLLM server",), needs=("average",)),
    Idle(_ROLLOUT, "the server was started with its own, and evaluates", idle_in=("vLLM server",), needs=("asynchronous",)),
    Idle(("vllm_server_host", "vllm_server_port"), "vllm_server_base_url is the address", needs=("vllm_server_base_url=None",)),
    Idle(("vllm_directory",), "weights are broadcast", idle_in=("vllm_transport='ipc'", "vllm_transport='gloo'", "vllm_transport='nccl'")),
    Idle(("vllm_group_port",), "weights travel by a folder", idle_in=("vllm_transport='directory'",)),
    Idle(("vllm_group_port",), "weights travel within a machine", idle_in=("vllm_transport='ipc'",)),
    Idle(("max_staleness", "pipeline_depth", "in_flight_weights", *_WORKERS), "it acts with async_rollouts=True", needs=("asynchronous",)),
    Idle(_WORKERS, "the vLLM server writes the rollouts", idle_in=("vLLM server",)),
    Idle(("pipeline_depth", "in_flight_weights"), "max_staleness=0 lets no rollout run ahead", idle_in=("max_staleness=0",)),
    Idle(_NATIVE, "it is the native engine's, and vLLM writes the completions", idle_in=_OF_VLLM),
    Idle(_NATIVE, "it is the native engine's, and transformers' generate writes the completions", idle_in=("generate",)),
    Idle(_CORRECTION, "completions of transformers' generate have no log-probabilities to correct by", idle_in=("no log-probabilities",)),
    Idle(_CORRECTION, "log-probabilities of truncated, penalized or constrained sampling are not those of the policy, and not corrected by",
        idle_in=("another distribution",)),
    Idle(("max_tool_calling_iterations",), "it acts with tools, an environment or an agent", needs=("tools", "environment", "agent")),
    Idle(("episode_timeout_seconds",), "it acts with tools or an environment", needs=("tools", "environment")),
    Idle(("agent_timeout_seconds", "agent_concurrency"), "it acts with an agent", needs=("agent",)),
    Idle(("ddp_timeout", "ddp_backend"), "there is one process", needs=("DDP", "FSDP2", "context parallel")),
    Idle(("live_timeout_seconds",), "its prompts come from no live source", needs=("live source",)),
)  # fmt: skip
"""Options that are idle in some runs; the first line that covers a run says why. `name_idle_losses` finds those of the loss."""


def name_idle(changed: Mapping[str, Any], features: Collection[str], args: Any, *, of_options: bool) -> None:
    """Warn once of each of the `changed` options that changes nothing in a run of these features and options.

    `of_options`: by what the options alone say; else by what the arguments of the trainer say too.
    """
    for name, value in changed.items():
        lines = [line for line in IDLE if name in line.options and line.covers(features, args)]
        if lines and lines[0].is_of_options == of_options:
            logger.warning("%s=%r changes nothing here: %s.", name, value, lines[0].why)


def refusal_of(features: Collection[str]) -> Refusal | None:
    """The refusal of a combination; None: it runs. Raises KeyError for an unknown feature or variant."""
    for feature in features:
        FEATURES[feature] if feature in FEATURES else VARIANTS[feature]
    return next((refusal for refusal in REFUSALS if refusal.covers(features)), None)


def expect_together(*features: str | bool | None, **words: object) -> None:
    """Raise ConfigError for a combination that is refused; entries that are no names are skipped: `args.fsdp and "FSDP2"`.

    `words`: those of its sentence that only the run can say.
    """
    refusal = refusal_of([feature for feature in features if isinstance(feature, str) and feature])
    if refusal is not None:
        raise ConfigError(refusal.why.format(**words))


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
        "thinking budget": args.thinking_token_budget is not None,
    }
    return [name for name, acts in active.items() if acts]
