"""The first lines of `covey train`, before heavy imports: model, data, algorithm, and output folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.early import default_of
from covey.cli.verb import Given


def show_header(given: Given, wanted: Mapping[str, Any]) -> None:
    """Say it on stderr, in the main process alone."""
    if int(os.environ.get("RANK", "0") or 0) == 0:
        output.say("\n".join(header_lines(given, wanted)))


def show_rows(dataset: Any, held_out: Any = None) -> None:
    """Say how many prompts there are, once they are read."""
    if int(os.environ.get("RANK", "0") or 0) == 0:
        more = f", {len(held_out):,} held out" if hasattr(held_out, "__len__") else ""
        rows = f"{len(dataset):,}" if hasattr(dataset, "__len__") else "a stream"
        output.say(_entry("rows", rows + more))


def header_lines(given: Given, wanted: Mapping[str, Any]) -> list[str]:
    """A line each for model, data, rewards, algorithm, batch and folder."""
    adapter = f", LoRA of rank {given['lora_r']}" if given.get("lora_r") else ""
    held_out = f", evaluated on {given['eval_dataset']}" if given.get("eval_dataset") else ""
    step = _resumes_at(given.get("resume", "never"), Path(str(wanted["output_dir"])))
    resumed = f", goes on from step {step}" if step is not None else ""
    rewards = [
        *(given.get("reward") or ()),
        *([given["environment_factory"]] if given.get("environment_factory") else []),
    ]
    tools = [_entry("tools", ", ".join(given["tools"]))] if given.get("tools") else []
    if given.get("agent"):
        tools.append(_entry("agent", given["agent"]))
    if given.get("ensemble"):
        tools.append(_entry("ensemble", ", ".join(given["ensemble"])))
    return [
        _entry("model", f"{given['model']}{adapter}"),
        _entry("data", f"{given['dataset']}{held_out}"),
        _entry("reward", ", ".join(rewards) or "the agent's score"),
        *tools,
        _entry("algorithm", str(wanted.get("algorithm") or _value(wanted, "loss_type"))),
        _entry("batch", _batch(wanted)),
        _entry("folder", f"{wanted['output_dir']}{resumed}"),
    ]


def _entry(name: str, text: str) -> str:
    return f"{name:<10} {text}"


def _value(wanted: Mapping[str, Any], name: str) -> Any:
    return wanted.get(name, default_of(name))


def _batch(wanted: Mapping[str, Any]) -> str:
    share = _value(wanted, "per_device_train_batch_size") * _value(wanted, "gradient_accumulation_steps")
    completions = share * int(os.environ.get("WORLD_SIZE", "1") or 1)
    group, steps = _value(wanted, "num_generations"), _value(wanted, "max_steps")
    length = f"{steps:,} steps" if steps > 0 else f"{_value(wanted, 'num_train_epochs'):g} passes over the rows"
    return f"{completions:,} completions a step, {group} a prompt; {length}"


def _resumes_at(resume: str, folder: Path) -> int | None:
    """The step of the checkpoint that a resume would take, by its name; None when it starts."""
    if resume == "never":
        return None
    names = [path.name for path in folder.glob("checkpoint-*")] if resume == "auto" else [Path(resume).name]
    return max((int(found[1]) for name in names if (found := re.fullmatch(r"checkpoint-(\d+)", name))), default=None)
