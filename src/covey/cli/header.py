"""The first lines of `covey train`, before heavy imports: model, data, algorithm, and output folder."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.cli.early import default_of
from covey.cli.verb import Args


def header_lines(args: Args, overrides: Mapping[str, Any]) -> list[str]:
    """A line each for model, data, rewards, algorithm, batch and folder."""
    adapter = f", LoRA of rank {args['lora_r']}" if args.get("lora_r") else ""
    held_out = f", evaluated on {args['eval_dataset']}" if args.get("eval_dataset") else ""
    step = _resumes_at(args.get("resume", "never"), Path(str(overrides["output_dir"])))
    resumed = f", goes on from step {step}" if step is not None else ""
    rewards = [
        *(args.get("reward") or ()),
        *([args["environment_factory"]] if args.get("environment_factory") else []),
    ]
    tools = [_entry("tools", ", ".join(args["tools"]))] if args.get("tools") else []
    if args.get("agent"):
        tools.append(_entry("agent", args["agent"]))
    if args.get("ensemble"):
        tools.append(_entry("ensemble", ", ".join(args["ensemble"])))
    return [
        _entry("model", f"{args['model']}{adapter}"),
        _entry("data", f"{args['dataset']}{held_out}"),
        _entry("reward", ", ".join(rewards) or "the agent's score"),
        *tools,
        _entry("algorithm", _algorithm(overrides)),
        _entry("batch", _batch(overrides)),
        _entry("folder", f"{overrides['output_dir']}{resumed}"),
    ]


def rows_line(dataset: Any) -> str:
    """Number of prompts, once they are read."""
    return _entry("rows", f"{len(dataset):,}" if hasattr(dataset, "__len__") else "a stream")


def _algorithm(overrides: Mapping[str, Any]) -> str:
    """Preset of the run; where neither it nor the loss is set, TRL's default, which is not `grpo`."""
    default = "" if "loss_type" in overrides else ", TRL's default loss of GRPO"
    return str(overrides.get("algorithm") or f"{_value(overrides, 'loss_type')}{default}")


def _entry(name: str, text: str) -> str:
    return f"{name:<10} {text}"


def _value(overrides: Mapping[str, Any], name: str) -> Any:
    return overrides.get(name, default_of(name))


def _batch(overrides: Mapping[str, Any]) -> str:
    share = _value(overrides, "per_device_train_batch_size") * _value(overrides, "gradient_accumulation_steps")
    completions = share * int(os.environ.get("WORLD_SIZE", "1") or 1)
    group, steps = _value(overrides, "num_generations"), _value(overrides, "max_steps")
    length = f"{steps:,} steps" if steps > 0 else f"{_value(overrides, 'num_train_epochs'):g} passes over the rows"
    return f"{completions:,} completions a step, {group} a prompt; {length}"


def _resumes_at(resume: str, folder: Path) -> int | None:
    """The step of the checkpoint that a resume would take, by its name; None when it starts."""
    if resume == "never":
        return None
    names = [path.name for path in folder.glob("checkpoint-*")] if resume == "auto" else [Path(resume).name]
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"checkpoint-(\d+)", name))), default=None)
