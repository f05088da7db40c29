"""The asynchronous sampler of a run, from its options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from covey.config import GRPOConfig
from covey.errors import ConfigError
from covey.process.world import World
from covey.rollout.asynchronous import AsynchronousSampler
from covey.rollout.worker import Setup
from covey.rollout.worker_process import ProcessWorker, Tell, Worker, halves
from covey.training.agents import Agents
from covey.training.sampling import sampler_options

logger = logging.getLogger(__name__)


def sampler_ahead(
    args: GRPOConfig,
    model: Any,
    tokenizer: Any,
    eos_ids: Sequence[int],
    world: World,
    agents: Agents,
    check_stop: Callable[[], None],
) -> AsynchronousSampler:
    """The asynchronous sampler. Raises ConfigError for options that workers cannot honour, before any is started."""
    options = {"eos_ids": tuple(eos_ids), **sampler_options(args, world)}
    _refuse(args, options, agents)
    setup = Setup(
        options=options,
        device=_device(args.rollout_device, world.device),
        threads=_threads(args, world.device),
        in_flight=args.in_flight_weights,
        takes_newest=args.in_flight_weights or args.pipeline_depth > 1,
    )

    def start(model: Any, content: bytes, version: int, tell: Tell) -> Worker:
        if args.rollout_placement == "ray":
            from covey.rollout.on_ray import RayWorker

            return RayWorker(model, content, version, setup, tell)
        return ProcessWorker(model, content, version, setup, tell)

    return AsynchronousSampler(model, tokenizer, start, args.rollout_workers, check_stop)


def _refuse(args: GRPOConfig, options: dict[str, Any], agents: Agents) -> None:
    if agents.are_used:
        what = (
            "rollout_func"
            if agents.rollout_func is not None
            else "environment_factory"
            if agents.environments
            else "tools"
        )
        raise ConfigError(
            f"async_rollouts=True samples in another process, where {what} of this one cannot be called; leave one of them out."
        )
    if options.get("backend") == "generate" and args.max_staleness:
        raise ConfigError(
            "generation_kwargs that only transformers' generate knows give no log-probabilities, so staleness could not be "
            "corrected; leave them out, or set max_staleness=0."
        )


def _device(asked: str | None, learner: torch.device) -> str:
    """Device of the workers. Raises ConfigError for an absent device."""
    if asked is None:
        if learner.type != "cuda":
            return str(learner)
        behind = (learner.index or 0) + 1
        return f"cuda:{behind}" if behind < torch.cuda.device_count() else str(learner)
    try:
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"rollout_device={asked!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return asked


def _threads(args: GRPOConfig, device: torch.device) -> int:
    """Intra-op threads of a worker: all if learner and worker alternate, else its share of half of them."""
    own = torch.get_num_threads()
    if device.type != "cpu" or not args.max_staleness:
        return own
    return max(1, halves(own)[1] // args.rollout_workers)
