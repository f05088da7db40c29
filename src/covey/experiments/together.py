"""`covey.train_together`: adapters of several runs on one frozen base, each bitwise equal to a separate run."""

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.adapters import refuse_base_writes
from covey.config import GRPOConfig
from covey.errors import ArgumentTypeError, ConfigError
from covey.experiments.interleaving import Member, interleave
from covey.models import SharedBase
from covey.runs import StopRequest
from covey.runs.console import lasting_output
from covey.training.loop import Steps
from covey.training.trainer import GRPOTrainer

logger = logging.getLogger(__name__)

_MANY_A_PROCESS = "tensorboard"
"""The only tracker that can write several runs from one process."""


def train_together(
    model: str | Path,
    runs: Iterable[Mapping[str, Any]],
    *,
    resume_from_checkpoint: str | bool | None = None,
    **common: Any,
) -> list[GRPOTrainer]:
    """Train several LoRA adapters on one base in one process, a step of each in turn. Returns their trainers, in order.

    `model` is a folder or a hub id, loaded once. Each of `runs` holds the arguments of its GRPOTrainer except the model: `args`
    with an `output_dir` of its own, and those that differ (`reward_funcs`, `peft_config`, `algorithm`, ...); `common` holds
    shared arguments. Every run writes its own folder, and ends bitwise equal to the same run alone.
    `resume_from_checkpoint`: as in `train()`; "auto" resumes runs with a checkpoint and starts the others.

    A run that fails does not end the others; its error is raised after they ended. After a stop signal every run saves a
    checkpoint, and KeyboardInterrupt or SystemExit(75) is raised. Raises ConfigError for runs that cannot share a process.
    """
    listed = list(runs) if isinstance(runs, Iterable) else [runs]
    if not all(isinstance(run, Mapping) for run in listed):
        raise ArgumentTypeError(
            f"runs={runs!r:.60} must be a list of mappings, each with the arguments of a GRPOTrainer."
        )
    # PEFT modifies the configuration in place
    together = [{**common, **run} for run in listed]
    together = [{**run, "peft_config": copy.deepcopy(run.get("peft_config"))} for run in together]
    for number, run in enumerate(together):
        if not isinstance(run.get("args"), GRPOConfig):
            raise ConfigError(f"runs[{number}] has no args; give it a covey.GRPOConfig with an output_dir of its own.")
        if run.get("peft_config") is None:
            raise ConfigError(
                f"runs[{number}] has no peft_config; only adapters share a base, such as LoraConfig(...)."
            )
        refuse_base_writes(run["peft_config"])
    refuse_unshareable([run["args"] for run in together])
    base = SharedBase(model)
    trainers: dict[int, GRPOTrainer] = {}
    members = [
        Member(Path(run["args"].output_dir).name, _steps(base, run, resume_from_checkpoint, trainers, number))
        for number, run in enumerate(together)
    ]
    with lasting_output(), StopRequest() as stop, stop.for_all():
        interleave(members)
    failed = [member for member in members if member.error is not None]
    for member in failed:
        logger.error("%s failed: %s", member.name, member.error)
    if failed and failed[0].error is not None:
        raise failed[0].error
    stop.leave()
    return [trainers[number] for number in range(len(together))]


def _steps(
    base: SharedBase, run: Mapping[str, Any], resume: str | bool | None, trainers: dict[int, GRPOTrainer], number: int
) -> Steps[None]:
    """Steps of a run, its construction included, so that random initialization uses its own generators."""
    trainer = trainers[number] = GRPOTrainer(base, **run)
    trainer.raises_when_stopped = False
    yield from trainer.steps(resume)


def refuse_unshareable(configs: Sequence[GRPOConfig]) -> None:
    """Raise ConfigError for runs that cannot be interleaved in one process."""
    if not configs:
        raise ConfigError("There is no run to train; give at least one.")
    places = [str(Path(str(config.output_dir)).expanduser().resolve()) for config in configs]
    for place in places:
        if places.count(place) > 1:
            raise ConfigError(f"Two runs have the output_dir {place}; give each its own.")
    uploads = [config.hub_model_id for config in configs if config.push_to_hub and config.hub_model_id]
    if len(set(uploads)) < len(uploads):
        raise ConfigError(
            "Two runs would upload to the same hub_model_id; leave it out, and each takes its folder's name."
        )
    for config in configs:
        if config.world_size > 1:
            raise ConfigError(
                "Runs on one base train in one process; start them without accelerate launch or torchrun."
            )
        trackers = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or ())
        for name in trackers:
            if name not in ("none", _MANY_A_PROCESS):
                raise ConfigError(
                    f"report_to={name!r} follows one run a process; for runs on one base take tensorboard or none."
                )
    for name in ("full_determinism", "use_cpu"):
        if len({getattr(config, name) for config in configs}) > 1:
            raise ConfigError(f"{name} holds for the whole process; give every run on one base the same value.")
