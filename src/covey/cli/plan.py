"""What a run would do, without doing it: its options, its batch arithmetic in words, and its memory."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from covey import options
from covey.bounded import read_json
from covey.build import build_algorithm
from covey.cli import output
from covey.cli.verb import Given
from covey.config import GRPOConfig, batch_arithmetic
from covey.errors import ModelError
from covey.learner.memory import Memory, Shape, bytes_for_outputs, enough_tokens, estimate, starting_tokens
from covey.places import refuse_missing
from covey.rollout.engine import BFLOAT16_FROM
from covey.rollout.linear import has_bfloat16

_CHARACTERS_A_TOKEN = 3  # on the safe side for English text; the tokenizer is not loaded for an estimate


def show(config: GRPOConfig, given: Given, wanted: Mapping[str, Any], dataset: Any) -> None:
    """Print the plan: as JSON on stdout with `--json`, else as text."""
    counts = batch_arithmetic(config, num_prompts=len(dataset) if hasattr(dataset, "__len__") else None)
    prompt_tokens = longest_prompt_tokens(dataset)
    memory = memory_of(config, given, counts.prompts_per_generation, prompt_tokens)
    if given.get("json"):
        plan = {
            "config": resolved(config),
            "arithmetic": {**vars(counts), "in_words": counts.in_words()},
            "memory": {**vars(memory), "peak": memory.peak},
        }
        output.result_json(plan)
        return
    defaults = options.defaults_of(GRPOConfig)
    output.result("options that you set (default):")
    for name in wanted:
        output.result(f"  {name}: {_plain(getattr(config, name))} ({_plain(defaults[name])})")
    rest = [f"{name}={value}" for name, value in resolved(config).items() if name not in wanted]
    output.result("all others:\n" + textwrap.fill(", ".join(rest), 110, initial_indent="  ", subsequent_indent="  "))
    output.result("\nbatch arithmetic:\n" + _indented(counts.in_words()))
    output.result(
        f"\nmemory on each device, for prompts of up to {prompt_tokens} tokens:\n" + _indented(memory.in_words())
    )
    output.say("\nNothing was trained; leave --dry-run out to start. --print-config shows every option.")


def resolved(config: GRPOConfig) -> dict[str, Any]:
    """Every option that acts, as plain values."""
    return {name: _plain(value) for name, value in vars(config).items() if name in options.HONOURED}


def as_yaml(wanted: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Every option as YAML that `--config` reads, those of the verb first. What follows from others stays unset."""
    import yaml

    kept = {name: value for name, value in own.items() if name not in ("print_config", "dry_run", "config", "json")}
    defaults = {
        name: _plain(value) for name, value in options.defaults_of(GRPOConfig).items() if name in options.HONOURED
    }
    return yaml.safe_dump({**kept, **defaults, **wanted}, sort_keys=False, allow_unicode=True).rstrip()


def memory_of(config: GRPOConfig, given: Given, prompts: int, prompt_tokens: int) -> Memory:
    """The estimate for a model by name, from its configuration alone."""
    init = config.model_init_kwargs if isinstance(config.model_init_kwargs, dict) else {}
    shape = Shape.of(model_config(given["model"], config.trust_remote_code))
    algorithm = build_algorithm(config)
    weight_bytes = (
        2 if str(init.get("dtype", "float32")).removeprefix("torch.") in ("bfloat16", "float16", "half") else 4
    )
    compute_bytes = 2 if config.bf16 or config.fp16 else weight_bytes
    on_cpu = config.use_cpu or not torch.accelerator.is_available()
    is_checkpointed = config.checkpoints_activations
    return estimate(
        shape,
        weight_bytes=weight_bytes,
        compute_bytes=compute_bytes,
        optimizer=str(getattr(config.optim, "value", config.optim)),
        rows=config.per_device_train_batch_size,
        prompt_tokens=prompt_tokens,
        completion_tokens=config.max_completion_length,
        max_tokens=starting_tokens(
            config.max_tokens_per_microbatch,
            shape,
            on_cpu=on_cpu,
            compute_bytes=compute_bytes,
            is_checkpointed=is_checkpointed,
        ),
        enough_tokens=enough_tokens(config.max_tokens_per_microbatch, on_cpu=on_cpu),
        logits_chunk=config.logits_chunk_tokens,
        is_checkpointed=is_checkpointed,
        has_reference=algorithm.needs.ref_logp or algorithm.needs.distribution,
        adapter_rank=given.get("lora_r"),
        prompts=-(-prompts // config.world_size),
        group=config.num_generations,
        has_critic_model=getattr(algorithm.critic, "model", None) == "separate",
        is_on_heap=on_cpu,
        output_bytes=bytes_for_outputs(config.reuse_rollout, shape.hidden, is_checkpointed=is_checkpointed),
        samples_in_copy=on_cpu
        and weight_bytes == 4
        and shape.num_parameters >= BFLOAT16_FROM
        and has_bfloat16(torch.device("cpu")),
    )


def model_config(model: str, trust_remote_code: bool) -> Any:
    """The configuration of a model by name, without its weights. Raises ModelError when there is none."""
    from transformers import AutoConfig

    from covey.models import resolve_source, told_as_model_error

    source = resolve_source(model)
    refuse_missing(source, "model folder")
    if (config := Path(source) / "config.json").is_file():
        read_json(config, ModelError)
    with told_as_model_error(source):
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)


def longest_prompt_tokens(dataset: Any, rows: int = 1000) -> int:
    """About how many tokens the longest of the first prompts has, by its characters."""
    taken = dataset.select(range(min(rows, len(dataset)))) if hasattr(dataset, "select") else dataset.take(rows)
    return max((_characters(row["prompt"]) for row in taken), default=0) // _CHARACTERS_A_TOKEN


def _characters(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content") or "")) for message in prompt)


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    return value if isinstance(value, bool | int | float | str | list | dict | None) else str(value)


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
