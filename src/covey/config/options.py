"""Options by what Covey does with each: it acts, has no effect, or is refused. Views of the declarations, light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from covey.config.fields import Options
from covey.config.inherited import INHERITED
from covey.config.option import Option, declaration_of

TYPES: Mapping[str, str] = {item.name: str(item.type) for item in fields(Options)}
"""Annotations of the options that are fields of `Options`."""

DECLARED: Mapping[str, Option] = {
    **INHERITED,
    **{item.name: option for item in fields(Options) if (option := declaration_of(item)) is not None},
}
"""The declaration of every option, TrainingArguments' options first."""

GROUP_NAMES = (
    "model", "data", "steps and batches", "sampling", "vLLM", "loss", "reference model", "rewards", "sampler and learner", "optimizer",
    "numbers gone bad", "alerts", "evaluation", "output", "hub", "memory, precision and devices",
    "several processes",
)  # fmt: skip
GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name, option in DECLARED.items() if option.group == group) for group in GROUP_NAMES
}
"""Options that have an effect, as the command line's help shows them."""

HONOURED = frozenset(name for names in GROUPS.values() for name in names)
INERT: Mapping[str, str] = {name: option.inert for name, option in DECLARED.items() if option.inert}
REFUSED: Mapping[str, str] = {name: option.refused for name, option in DECLARED.items() if option.refused}

RECIPE = "train.yaml"
"""File in a run's folder with every option of the command that started it, as `--config` reads them."""

RENAMED: Mapping[str, str] = {
    "vllm_guided_decoding_regex": "It is vllm_structured_outputs_regex in TRL now.",
    "max_prompt_length": "Prompts are never cut; leave long ones out of the data set.",
    "warmup_ratio": "Use warmup_steps, which takes a share of the run below 1.",
    "evaluation_strategy": "Use eval_strategy.",
    "no_cuda": "Use use_cpu.",
    "logging_dir": "Set the environment variable TENSORBOARD_LOGGING_DIR.",
    "overwrite_output_dir": "A run folder is never overwritten; give a new output_dir or resume the run.",
    "group_by_length": "Memory is bounded by max_tokens_per_microbatch.",
    "per_gpu_train_batch_size": "Use per_device_train_batch_size.",
    "use_liger_loss": "Leave it out: logits are already computed by chunks, see logits_chunk_tokens.",
    "kl_coef": "Use beta.",
    "clip_range": "Use epsilon.",
}
"""Former or foreign option names, with their replacements."""

ALGORITHM_OPTIONS = (
    *(
        name
        for name in (*GROUPS["loss"], *GROUPS["reference model"], *GROUPS["sampler and learner"])
        if name != "algorithm"
    ),
    *("scale_rewards", "multi_objective_aggregation", "advantage_slices"),
)
"""Options that compose an algorithm; they cannot be combined with `algorithm`."""

IDLE_WITHOUT_SAMPLING = frozenset(
    name
    for group in ("sampling", "vLLM", "loss", "reference model", "rewards", "sampler and learner")
    for name in GROUPS[group]
) - {"curriculum", "metrics_by"} | {"num_generations", "num_generations_eval", "router_replay"}
"""Options that change nothing where completions come from the data set."""


def defaults_of(config_class: Any) -> dict[str, Any]:
    """Default of each field of a dataclass, factories called."""
    made = {}
    for item in fields(config_class):
        made[item.name] = item.default_factory() if item.default_factory is not MISSING else item.default
    return made


def is_changed(value: Any, default: Any) -> bool:
    """True if an option differs from its default; all spellings of off (None, False, an empty list) are equal."""
    return bool(value or default) and bool(value != default)
