"""`covey doctor memory`: how much memory a run needs and by what, what would lower it, and the longest micro-batch tried."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from covey.cli import output, train
from covey.cli.adapter import adapter, adapter_to_train
from covey.cli.checkpoints import model_folder
from covey.cli.flags import Flag
from covey.cli.verb import Args
from covey.errors import ConfigError

if TYPE_CHECKING:
    from covey.config import GRPOConfig
    from covey.doctor import Finding
    from covey.learner.memory_estimate import Memory

_PROMPT_TOKENS = Flag(
    name="prompt_tokens", help="Tokens of the longest prompt; left out: from --dataset, or 512 where none is named.", type=int, least=1, group="run"
)  # fmt: skip
_PREDICT_ONLY = Flag(
    name="predict_only", help="Show only the prediction: load nothing and try nothing.", type=bool, group="run"
)
_ASSUMED = 512
_ONE_PROMPT = [None]
"""A data set of one row: its size does not count here."""
_WORTH = 0.95
"""Share of the peak that a change must get below to be shown."""


def run(args: Args) -> int:
    """Predict, show what would lower it, and try. Exit code 1 where it does not fit."""
    if not args.get("model"):
        raise ConfigError(
            "--model is missing: the model whose memory is asked for, such as covey doctor memory --model demo."
        )
    from covey.cli.plan import memory_of
    from covey.config import GRPOConfig
    from covey.doctor import plan
    from covey.doctor.plan import try_without_data

    verb_flags = {_PROMPT_TOKENS.name, _PREDICT_ONLY.name}
    overrides = train.config_options({name: value for name, value in args.items() if name not in verb_flags})
    config = GRPOConfig(**overrides)
    tokens = _prompt_tokens(args, config)
    memory = memory_of(config, args, _ONE_PROMPT, tokens)
    available, where = plan.available_memory(config.device)
    lower = dict(_lower(overrides, args, tokens, memory.peak))
    findings = [plan.memory(memory.peak, available, where)]
    if not args.get("json"):
        _show(memory, lower, tokens, config, findings[0])
    if findings[0].status != "FAIL" and not args.get("predict_only"):
        findings.append(try_without_data(model_folder(args["model"]), config, adapter(args), tokens))
        if not args.get("json"):
            _row(findings[-1])
    fits = all(finding.status != "FAIL" for finding in findings)
    if args.get("json"):
        parts = {**vars(memory), "peak": memory.peak}
        output.result_json({"ok": fits, "prompt_tokens": tokens, "memory": parts, "available": available, "lower": lower,
                            "findings": [vars(finding) for finding in findings]})  # fmt: skip
    return 0 if fits else 1


def _prompt_tokens(args: Args, config: GRPOConfig) -> int:
    from covey.cli.plan import longest_prompt_tokens

    if args.get("prompt_tokens"):
        return int(args["prompt_tokens"])
    if not args.get("dataset"):
        return _ASSUMED
    dataset = train.load_prompts(args["dataset"], args, args.get("max_prompts"))
    return longest_prompt_tokens(dataset, args["model"], config)


def _lower(overrides: Mapping[str, Any], args: Args, tokens: int, peak: int) -> Iterator[tuple[str, int]]:
    """Options that the run does not have and that would lower its peak, with the peak, lowest first."""
    from covey.cli.plan import memory_of
    from covey.config import GRPOConfig

    config = GRPOConfig(**overrides)
    changes: dict[str, dict[str, Any]] = {
        "--gradient-checkpointing": {"gradient_checkpointing": True},
        "--optim adamw_bnb_8bit": {"optim": "adamw_bnb_8bit"},
        "--lora-r 16": {"lora_r": 16},
        "--max-tokens-per-microbatch 1024": {"max_tokens_per_microbatch": 1024},
    }
    if config.beta:
        changes["--beta 0"] = {"beta": 0.0}
    peaks = []
    for spelled, change in changes.items():
        is_in_force = all(args.get(name) == value for name, value in change.items())
        if is_in_force or ("lora_r" in change and adapter_to_train(args)):
            continue
        changed = GRPOConfig(**{**overrides, **{name: value for name, value in change.items() if name != "lora_r"}})
        peaks.append((spelled, memory_of(changed, {**args, **change}, _ONE_PROMPT, tokens).peak))
    yield from sorted((entry for entry in peaks if entry[1] < _WORTH * peak), key=lambda entry: entry[1])


def _show(memory: Memory, lower: Mapping[str, int], tokens: int, config: GRPOConfig, finding: Finding) -> None:
    from covey.learner.memory_estimate import in_gib

    output.result(
        f"{config.per_device_train_batch_size} completions of {config.max_completion_length} tokens behind prompts of up to "
        f"{tokens}, on each device:"
    )
    output.result(textwrap.indent(memory.in_words(), "  "))
    if lower:
        output.result("what would lower the peak:")
        width = max(map(len, lower)) + 2
        for spelled, peak in lower.items():
            output.result(f"  {spelled:<{width}}{in_gib(peak):>10}")
    _row(finding)


def _row(finding: Finding) -> None:
    output.row(finding.status, finding.area, finding.said, finding.fix)


verb = replace(
    train.verb,
    name="doctor memory",
    usage="[CONFIG.yaml | demo] --model MODEL [options of covey train]",
    sentence="How much memory a run needs and by what, what would lower it, and whether the longest micro-batch fits: tried.",
    examples=(
        "covey doctor memory --model demo",
        "covey doctor memory --model Qwen/Qwen2.5-0.5B-Instruct --lora-r 16 --max-completion-length 2048",
        "covey doctor memory run.yaml --predict-only --json",
    ),
    flags=partial(train.planning_flags, _PROMPT_TOKENS, _PREDICT_ONLY),
    run=run,
)
