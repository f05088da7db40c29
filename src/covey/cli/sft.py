"""`covey sft`: supervised fine-tuning on prompts with target completions, as a warm-up or alone."""

import functools
import sys
from pathlib import Path
from typing import Any

from covey.cli import early, output
from covey.cli.adapter import WEIGHTS, adapter, refuse_bad_adapter
from covey.cli.checkpoints import FINAL, model_folder
from covey.cli.fields import config_flags
from covey.cli.flags import Flag
from covey.cli.train import config_options, resume_command
from covey.cli.verb import CONFIG, JSON, PLACES, Args, Verb
from covey.config import options
from covey.errors import ConfigError

_WHAT = (
    Flag(name="model", help="Model to train: a folder, a run, a checkpoint, a hub id, or demo for the one that ships with Covey.", group="what"),
    Flag(name="dataset", help="Examples: a JSONL, CSV or Parquet file, a folder or a hub id; PATH:SPLIT picks a split.", group="what"),
    Flag(name="eval_dataset", help="Held-out examples, like --dataset; their loss is reported at the end, and as set by --eval-strategy.", group="what"),
    CONFIG,
    Flag(name="resume", help="auto: continue where this run stopped, or start; never: start; or the path of a checkpoint.", default="never", group="run"),
    Flag(name="prompt_column", help="Column that holds the prompt: text or chat messages.", default="prompt", group="data"),
    Flag(name="completion_column", help="Column of the target completion.", default="completion", group="data"),
    Flag(name="max_length", help="Most tokens of an example, prompt and completion together; unset: the model's context.", type=int, group="data"),
    Flag(name="max_examples", help="Use the first N examples only.", type=int, group="data"),
    *WEIGHTS,
    JSON,
)  # fmt: skip
_CLI_FLAGS = frozenset(flag.name for flag in _WHAT)
_GROUPS = (
    "model", "data", "steps and batches", "optimizer", "numbers gone bad", "evaluation", "output",
    "memory, precision and devices",
)  # fmt: skip
_IDLE = frozenset(
    {
        "generation_batch_size", "steps_per_generation", "num_iterations", "log_completions",
        "num_completions_to_print", "log_unique_prompts", "remove_unused_columns", "target_kl",
    }
)  # fmt: skip
"""Options of those groups that have no effect without sampling."""
_COMMON = frozenset(
    {
        "output_dir", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
        "lr_scheduler_type", "warmup_steps", "eval_strategy", "eval_steps", "save_steps", "logging_steps", "report_to", "bf16",
        "gradient_checkpointing", "seed",
    }
)  # fmt: skip
_DEFAULTS = {"learning_rate": "2e-05", "num_train_epochs": "1.0", "rollout_log_steps": "0"}


@functools.cache
def flags() -> tuple[Flag, ...]:
    from dataclasses import replace

    named = {name for group in _GROUPS for name in options.GROUPS[group]} - _IDLE - options.IDLE_WITHOUT_SAMPLING
    chosen = [flag for flag in config_flags(_COMMON) if flag.name in named]
    return (*_WHAT, *(replace(flag, default=_DEFAULTS.get(flag.name, flag.default)) for flag in chosen))


def run(args: Args) -> int:
    for name in ("model", "dataset"):
        if not args.get(name):
            raise ConfigError(f"--{name} is missing: {next(flag.help for flag in _WHAT if flag.name == name)}")
    overrides = config_options(args, _CLI_FLAGS, "sft")
    early.refuse_early(overrides)
    refuse_bad_adapter(args)
    args = {**args, "model": model_folder(args["model"])}
    output.say(f"model      {args['model']}\ndata       {args['dataset']}\nfolder     {overrides['output_dir']}")
    from covey.training.warm_up import SFTTrainer, sft_config

    train, held_out = _examples(args["dataset"], args, args.get("max_examples")), None
    if args.get("eval_dataset"):
        held_out = _examples(args["eval_dataset"], args, None)
    config = sft_config(**overrides)
    trainer = SFTTrainer(
        args["model"], config, train, held_out, peft_config=adapter(args), max_length=args.get("max_length")
    )
    trainer.is_strict, trainer.raises_when_stopped = True, False
    trained = trainer.train(resume_from_checkpoint=args.get("resume"))
    if trainer.stopped_by:
        again = resume_command(sys.argv, str(config.output_dir))
        output.say(f"Stopped by {trainer.stopped_by} after step {trained.global_step}; go on with: {again}")
        return trainer.exit_code
    place = Path(str(config.output_dir)) / FINAL
    trainer.save_model(str(place))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics: dict[str, Any] = {**trained.metrics, **({"loss": losses[-1]} if losses else {})}
    if held_out is not None:
        metrics |= trainer.evaluate()
    if trainer.is_world_process_zero():
        _report(args, str(config.output_dir), place, trained.global_step, metrics)
    return 0


def _report(args: Args, run: str, place: Path, steps: int, metrics: dict[str, Any]) -> None:
    if args.get("json"):
        output.result_json({"run": run, "model": str(place), "steps": steps, "metrics": metrics})
        return
    output.result(f"trained {steps} steps in {metrics['train_runtime']:.0f} s: {run}")
    for name in ("loss", "eval_loss"):
        if name in metrics:
            output.result(f"  {name:<24}{metrics[name]:.4g}")
    output.say(f"go on with a reward: covey train --model {place} --dataset ... --reward ...")


def _examples(named: str, args: Args, limit: int | None) -> Any:
    from covey.data.examples import load_examples

    columns = {name: args.get(name) or name.removesuffix("_column") for name in ("prompt_column", "completion_column")}
    return load_examples(named, limit=limit, **columns)


verb = Verb(
    name="sft",
    usage="[CONFIG.yaml] --model MODEL --dataset DATA [options]",
    sentence="Fine-tune a language model on right answers, before or without a reward.",
    examples=(
        "covey sft --model Qwen/Qwen2.5-0.5B --dataset solutions.jsonl --output-dir runs/warm",
        "covey sft --model demo --dataset chats.jsonl --lora-r 16 --eval-dataset held-out.jsonl",
    ),
    flags=flags,
    types=early.option_types,
    places=PLACES,
    has_defaults=False,
    positional=("config",),
    run=run,
)
