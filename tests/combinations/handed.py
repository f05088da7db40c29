"""The values that the options of a run hand to its sampler: the real builders, with samplers and workers that record what they are made with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch

from covey import GRPOConfig
from covey.config.options import DECLARED, GROUPS
from covey.learner import Policy
from covey.process.interruption import Interruption
from covey.process.world import World
from covey.rollout import on_ray
from covey.rollout.asynchronous import AsynchronousSampler
from covey.training import build, build_sampler
from covey.training.build_learner import RunInputs
from covey.training.drawing import RolloutSampling
from kit import tiny_model, tiny_tokenizer

SAMPLERS: dict[str, dict[str, Any]] = {
    "native": {},
    "transformers": {"rollout_backend": "transformers"},
    "generate": {"generation_kwargs": {"no_repeat_ngram_size": 50}},
    "vLLM server": {"use_vllm": True, "vllm_mode": "server"},
    "vLLM in process": {"use_vllm": True},
}
AHEAD = {"async_rollouts": True, "max_staleness": 2}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "several processes": {},
    "ahead": AHEAD,  # in a process, or with a server in a thread
    "ahead by Ray": {**AHEAD, "rollout_placement": "ray"},
}
ELSEWHERE = {"curriculum", "dynamic_sampling"}
"""Options of sampling that the stream of prompts and the loop read, the same for every sampler."""
OPTIONS = [name for group in ("sampling", "vLLM") for name in GROUPS[group] if name not in ELSEWHERE]
OTHER: dict[str, Any] = {
    "agent_timeout_seconds": 9.0, "cuda_graphs": True, "episode_timeout_seconds": 3.0, "generation_kwargs": {"stop": ["x"]},
    "max_tool_calling_iterations": 3, "thinking_token_budget": 7, "min_p": 0.1, "rollout_device": "meta", "rollout_dtype": "bfloat16", "rollout_max_rows": 4,
    "vllm_deadlines": {"pause": 7}, "vllm_directory": "elsewhere", "vllm_max_model_length": 64, "vllm_server_host": "localhost",
    "vllm_server_base_url": "http://localhost:8000", "vllm_structured_outputs_regex": "a+", "vllm_transport": "gloo",
}  # fmt: skip
"""Values that differ from the defaults, where `other_than` does not know one."""
USUAL = {"output_dir": "unused", "use_cpu": True, "report_to": "none", "max_steps": 4, "max_completion_length": 16}


def other_than_usual(name: str) -> Any:
    """A value of an option that is not its default, nor that of `USUAL`."""
    usual, declared = USUAL.get(name, getattr(GRPOConfig, name)), DECLARED[name]
    if name in OTHER:
        return OTHER[name]
    if declared.words:
        return next(word for word in declared.words if word != usual)
    if isinstance(usual, bool):
        return not usual
    return usual / 2 if isinstance(usual, float) else usual + 1


class Recorded:
    """A sampler or a worker that is not started, with the arguments of its constructor."""

    def __init__(self, *positional: Any, **options: Any) -> None:
        self.positional, self.options = positional, options


class RecordedByRay(Recorded):
    pass


class RecordedAhead(AsynchronousSampler):
    """The asynchronous sampler of a run, with the worker that it would start."""

    def __init__(self, model: Any, tokenizer: Any, start: Any, *positional: Any, **options: Any) -> None:
        super().__init__(model, tokenizer, start)
        self.positional, self.options = positional, options
        self.worker = start(model, b"", 0, lambda message: None, 0)


@contextmanager
def recording(world_size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose_sampler", Recorded)
        patch.setattr(build_sampler, "CentralSampler", RecordedAhead)
        for name in ("ServerSampler", "ThreadWorker", "ProcessWorker"):
            patch.setattr(build_sampler, name, Recorded)
        patch.setattr(on_ray, "RayWorker", RecordedByRay)
        patch.setattr(GRPOConfig, "world_size", world_size)
        yield


@lru_cache
def model_of_the_run() -> tuple[Any, Any]:
    return tiny_model(hidden=16), tiny_tokenizer()


class NoReward:
    replaced, read = None, None


def values_of(args: GRPOConfig) -> dict[str, str]:
    """Plain values of the sampler, the draws and the supply of prompts of a run with these options."""
    model, tokenizer = model_of_the_run()
    world, nothing, interruption = World(device=torch.device("cpu")), None, Interruption(lambda: False)
    inputs = RunInputs(args, model, tokenizer, (2,), nothing, NoReward(), nothing, world)
    sampler = build.build_sampler(inputs, Policy(model=model, pad_id=0), interruption)
    sampling = RolloutSampling(build.sampling_params(args), args.seed)
    sizes = {"prompts_per_rollout": 1, "num_generations": 8, "total_steps": 4}
    supply = build.build_supply(args, nothing, sampler, sampling, 1, interruption, **sizes)
    leaves = Leaves()
    leaves.add("", (sampler, sampling, supply))
    return leaves.values


@dataclass
class Leaves:
    """Plain values within an object, by their path."""

    values: dict[str, str] = field(default_factory=dict)
    seen: dict[int, Any] = field(default_factory=dict)

    def add(self, path: str, value: Any) -> None:
        if value is None or isinstance(value, bool | int | float | str):
            self.values[path] = repr(value)
        elif id(value) not in self.seen and not isinstance(value, torch.nn.Module | GRPOConfig | type):
            self.seen[id(value)], self.values[path] = value, type(value).__name__
            for name, part in self.parts(value):
                self.add(f"{path}.{name}", part)

    def parts(self, value: Any) -> list[tuple[Any, Any]]:
        if isinstance(value, Mapping):
            return list(value.items())
        if isinstance(value, list | tuple):
            return list(enumerate(value))
        is_ours = type(value).__module__.startswith(("covey", "combinations"))
        return [(name, part) for name, part in getattr(value, "__dict__", {}).items() if is_ours and name != "_clock"]
