"""Plan of a run (`--dry-run`, `--print-config`): its options, its batch arithmetic in words, and its memory."""

import textwrap
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from covey.cli import output
from covey.cli.adapter import adapter_to_train
from covey.cli.checkpoints import model_folder
from covey.cli.verb import Args
from covey.config import GRPOConfig, options
from covey.config.batches import Arithmetic, batch_arithmetic
from covey.doctor.dry_run import dry_run
from covey.learner.memory_estimate import Memory


def show(config: GRPOConfig, args: Args, overrides: Mapping[str, Any], dataset: Any) -> None:
    """Print the plan: as JSON on stdout with `--json`, else as text."""
    counts = counts_of(config, dataset)
    prompt_tokens = longest_prompt_tokens(dataset, args["model"], config)
    memory = memory_of(config, args, dataset, prompt_tokens)
    if args.get("json"):
        plan = {
            "config": resolved(config),
            "arithmetic": {**vars(counts), "in_words": counts.in_words()},
            "memory": {**vars(memory), "peak": memory.peak},
        }
        output.result_json(plan)
        return
    defaults = options.defaults_of(GRPOConfig)
    output.result("options that you set (default):")
    for name in overrides:
        output.result(f"  {name}: {_plain(getattr(config, name))} ({_plain(defaults[name])})")
    rest = [f"{name}={value}" for name, value in resolved(config).items() if name not in overrides]
    output.result("all others:\n" + textwrap.fill(", ".join(rest), 110, initial_indent="  ", subsequent_indent="  "))
    output.result("\nbatch arithmetic:\n" + textwrap.indent(counts.in_words(), "  "))
    output.result(
        f"\nmemory on each device, for prompts of up to {prompt_tokens} tokens:\n"
        + textwrap.indent(memory.in_words(), "  ")
    )
    output.say("\nNothing was trained; leave --dry-run out to start. --print-config shows every option.")


def expect_runnable(config: GRPOConfig, args: Args, dataset: Any, held_out: Any) -> None:
    """Raise what the run would for rewards, their weights and columns, the evaluation set, and the prompts."""
    from covey.rewards import Scorer
    from covey.training.datasets import checked_eval

    # environments and agents bring rewards and columns of their own
    is_agentic = any(args.get(name) for name in ("environment_factory", "agent", "rollout_func"))
    if args.get("reward"):
        with closing(Scorer.of(args["reward"], None if is_agentic else config.reward_weights)) as scorer:
            scorer.check(None if is_agentic or config.group_languages else dataset.column_names)
    checked_eval(held_out, config)
    _expect_prompts(config, args, dataset)


def _expect_prompts(config: GRPOConfig, args: Args, dataset: Any) -> None:
    """Raise for prompts of the first rollout that the run would refuse: too long, or with media that the model does not read; for thoughts too."""
    from covey.data import PromptStream, prepare_tokenizer
    from covey.models import context_limit
    from covey.models.longrope import short_rope_limit
    from covey.models.modalities.processors import load_processing
    from covey.models.passes import reads_media
    from covey.rollout.thinking import ThinkingBudget

    described = model_config(args["model"], config.trust_remote_code)
    model: Any = SimpleNamespace(config=described)  # nothing of it but its configuration is read
    processing = load_processing(model, model_folder(args["model"]), trust_remote_code=config.trust_remote_code)
    tokenizer = prepare_tokenizer(processing)
    if config.thinking_token_budget is not None:
        ThinkingBudget.of(tokenizer, config.thinking_token_budget)
    limit = None if short_rope_limit(described.get_text_config()) else context_limit(model)
    prompts = PromptStream(
        dataset,
        tokenizer,
        processor=processing if processing is not tokenizer and reads_media(described) else None,
        seed=config.seed if config.data_seed is None else config.data_seed,
        chat_template_kwargs=_template_of(config),
        max_prompt_length=None if limit is None else limit - config.max_completion_length,
        on_too_long=cast(Any, config.on_long_prompt),
        shuffle=config.shuffle_dataset,
        curriculum=config.curriculum,
    )
    if hasattr(dataset, "__len__"):
        prompts.take(min(len(dataset), counts_of(config, dataset).prompts_per_generation))


def expect_place(config: GRPOConfig, args: Args) -> None:
    """Raise what the run would for its folder, and for a checkpoint to resume from."""
    from covey.runs import checkpoint
    from covey.runs.output_dir import expect_usable

    place, resume = Path(str(config.output_dir)), args.get("resume")
    start = checkpoint.latest(place) if resume == "auto" else checkpoint.resolve(resume, place)
    expect_usable(place, start, restarts=resume == "auto")


def resolved(config: GRPOConfig) -> dict[str, Any]:
    """Every option that acts, as plain values."""
    return {name: _plain(value) for name, value in vars(config).items() if name in options.HONOURED}


def as_yaml(overrides: Mapping[str, Any], cli_args: Mapping[str, Any]) -> str:
    """Every option as YAML that `--config` reads, the verb's own first. Derived options stay unset."""
    import yaml

    settings = {
        name: value for name, value in cli_args.items() if name not in ("print_config", "dry_run", "config", "json")
    }
    defaults = {
        name: _plain(value) for name, value in options.defaults_of(GRPOConfig).items() if name in options.HONOURED
    }
    return yaml.safe_dump({**settings, **defaults, **overrides}, sort_keys=False, allow_unicode=True).rstrip()


def counts_of(config: GRPOConfig, dataset: Any) -> Arithmetic:
    """The batch arithmetic of a run on a data set, which may be a stream."""
    return batch_arithmetic(config, num_prompts=len(dataset) if hasattr(dataset, "__len__") else None)


def memory_of(config: GRPOConfig, args: Args, dataset: Any, prompt_tokens: int) -> Memory:
    """The memory of each device for a model by name and prompts of this length, by a dry run from its configuration alone."""
    return dry_run(
        config,
        model_config(args["model"], config.trust_remote_code),
        peft_config=adapter_to_train(args),
        prompts=-(-counts_of(config, dataset).prompts_per_generation // config.world_size),
        prompt_tokens=prompt_tokens,
    )


def model_config(model: str, trust_remote_code: bool) -> Any:
    """The configuration of a model by name, of an adapter that of its base, without weights. Raises ModelError when there is none."""
    from covey.models import config_of

    return config_of(model_folder(model), trust_remote_code=trust_remote_code)


def longest_prompt_tokens(dataset: Any, model: str, config: GRPOConfig) -> int:
    """Tokens of the longest prompt, by the tokenizer of the model's name or folder."""
    from covey.data import prepare_tokenizer
    from covey.data.lengths import longest_prompt
    from covey.models import load_tokenizer

    tokenizer = load_tokenizer(None, model_folder(model), trust_remote_code=config.trust_remote_code)
    return longest_prompt(dataset, prepare_tokenizer(tokenizer), _template_of(config))


def _template_of(config: GRPOConfig) -> Mapping[str, Any]:
    return config.chat_template_kwargs if isinstance(config.chat_template_kwargs, dict) else {}


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    return value if isinstance(value, bool | int | float | str | list | dict | None) else str(value)
