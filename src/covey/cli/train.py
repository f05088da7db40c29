"""`covey train`: post-train a model on your data with your rewards."""

import functools
import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from covey.cli import early, header, output, rerun, seeds, together
from covey.cli.adapter import WEIGHTS, adapter, refuse_bad_adapter
from covey.cli.checkpoints import FINAL, model_folder
from covey.cli.columns import column_map
from covey.cli.ensemble import ensemble_of, refuse_bad_ensemble
from covey.cli.fields import config_flags, other_flags
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, JSON, PLACES, Args, Verb, refuse_missing_places
from covey.config import options
from covey.demo import DEMO_SETTINGS
from covey.errors import ConfigError
from covey.experiments import series
from covey.experiments.several import Outcome
from covey.files.places import next_folder

_COMMON = frozenset(
    {
        "output_dir", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
        "num_generations", "max_completion_length", "temperature", "learning_rate", "lr_scheduler_type", "algorithm",
        "loss_type", "beta", "epsilon", "epsilon_high", "scale_rewards", "reward_weights", "eval_strategy", "eval_steps",
        "early_stopping_patience", "save_steps", "save_total_limit", "logging_steps", "report_to", "log_completions",
        "bf16", "gradient_checkpointing", "use_cpu", "seed",
    }
)  # fmt: skip
"""Options of GRPOConfig that `covey train --help` shows."""

_WHAT = (
    Flag(name="model", help="Model to train: a folder, a run, a checkpoint, a hub id, or demo for the one that ships with Covey.", group="what"),
    Flag(name="dataset", help="Prompts: a JSONL, CSV or Parquet file, a folder, a hub id, or demo; PATH:SPLIT picks a split, follow:PATH reads a file that grows, '0.7*A + 0.3*B' mixes.", group="what"),
    Flag(name="reward", help="Reward by name, or your own as file.py:function or package.module:function; may be repeated.", type=list[str], group="what"),
    Flag(name="tools", help="Functions that the model may call while it writes, as file.py:function; they need type hints and a docstring.", type=list[str], group="what"),
    Flag(name="environment_factory", help="Class of the environment that each completion acts in, as file.py:Class.", group="what"),
    Flag(name="rollout_func", help="Function of your own that writes the completions, as file.py:function.", group="what", is_common=False),
    Flag(name="agent", help="Agent of your own, a function of (row, client, model) that talks to the run's endpoint, as file.py:main.", group="what"),
    Flag(name="ensemble", help="Models that answer in addition to the policy: a path, a hub id or an endpoint, with options as in runs/b,role=rescue,samples=2.", type=list[str], group="what"),
    Flag(name="ensemble_max_share", help="Largest share of a group that members of the ensemble write; 0.5 when left out.", type=float, group="what", is_common=False),
    Flag(name="ensemble_threshold", help="An answer is right for a rescuer from this reward on; 0.5 when left out.", type=float, group="what", is_common=False),
    Flag(name="eval_dataset", help="Held-out prompts, like --dataset; evaluated at the end, and as set by --eval-strategy.", group="what"),
    CONFIG,
    Flag(name="recipe", help="Options that go together, where you set none: one of `covey recipes` for a model on given hardware, or fast, which uses each completion four times (docs/recipes.md).", group="run"),
    Flag(name="resume", help="auto: continue where this run stopped, or start; never: start; or the path of a checkpoint.", default="never", group="run"),
    Flag(name="from_run", help="Repeat the run in this folder; other flags change what they name.", group="run"),
    Flag(name="trust_source", help="With --from-run: run a reward or an algorithm of your own even if its file has changed, without asking.", type=bool, group="run", is_common=False),
    Flag(name="seeds", help="Number of seeds to train with, one after another; shows their mean with its interval.", type=int, least=1, group="run"),
    Flag(name="adapters", help="Number of LoRA adapters to train, each with its own seed, on one base in one process.", type=int, least=1, group="run"),
    Flag(name="vary", help="Train an adapter for each value, on one base in one process: NAME=A,B,C; several give every combination.", type=list[str], group="run"),
    Flag(name="share_base", help="With --seeds: train them side by side on one base in one process; needs --lora-r.", type=bool, group="run"),
    Flag(name="dry_run", help="Show the options, the batch arithmetic and an estimate of memory, and stop.", type=bool, group="run"),
    Flag(name="print_config", help="Print every option as YAML that --config reads, and stop.", type=bool, group="run"),
    Flag(name="prompt_column", help="Column that holds the prompt: text or chat messages.", default="prompt", group="data"),
    Flag(name="answer_column", help="Column that rewards receive as `answer`.", group="data"),
    Flag(name="columns", help="Columns under new names, as new=old.", type=list[str], group="data"),
    Flag(name="system_prompt", help="System message before every prompt, which then becomes a chat.", group="data"),
    Flag(name="dataset_config", help="Configuration of a hub data set that has several.", group="data", is_common=False),
    Flag(name="streaming", help="Read the data set as it is needed; needs --max-steps.", type=bool, group="data", is_common=False),
    Flag(name="max_prompts", help="Train on the first N prompts only; --max-eval-prompts is for held-out ones.", type=int, group="data"),
    Flag(name="max_eval_prompts", help="Evaluate on the first N held-out prompts only.", type=int, group="data"),
    *WEIGHTS,
    JSON,
)  # fmt: skip

_CLI_FLAGS = frozenset(flag.name for flag in _WHAT)
HINTS = {
    **options.RENAMED,
    "lr": "Use learning_rate.",
    "epochs": "Use num_train_epochs.",
    "steps": "Use max_steps.",
    "batch_size": "Use per_device_train_batch_size.",
    "model_name_or_path": "Use model.",
    "dataset_name": "Use dataset.",
    "dataset_path": "Use dataset.",
    "reward_funcs": "Use reward.",
    "reward_model_name_or_path": "Use reward.",
    "use_peft": "Set lora_r, such as 16.",
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "demo": {"model": "demo", "dataset": "demo", "reward": ["demo"], **DEMO_SETTINGS}
}
"""Options that a word stands for where a YAML file may stand: `covey train demo` learns what `covey demo` shows."""


@functools.cache
def flags() -> tuple[Flag, ...]:
    return (*_WHAT, *config_flags(_COMMON))


def planning_flags(*more: Flag) -> tuple[Flag, ...]:
    """`more`, and those of `covey train` but what repeats, resumes, multiplies or prints a run."""
    left_out = {"dry_run", "print_config", "resume", "from_run", "trust_source", "seeds"}
    return (*more, *(flag for flag in flags() if flag.name not in left_out))


def flag_types() -> dict[str, Any]:
    """Types of all flags, those of GRPOConfig without importing it."""
    return {**{flag.name: flag.type for flag in _WHAT}, **early.option_types()}


def run(args: Args) -> int:
    chosen = args
    if args.get("trust_source") and not args.get("from_run"):
        raise ConfigError("--trust-source belongs to --from-run, which names the run to repeat.")
    if args.get("from_run"):
        if args.get("resume") not in (None, "never"):
            raise ConfigError("--from-run starts a run anew and --resume goes on with one; keep one of them.")
        args = rerun.repeated(args, [*other_flags(), *flags()], flag_types())
    overrides = config_options(args)
    early.refuse_early(overrides)
    refuse_bad_adapter(args)
    if not args.get("print_config"):
        refuse_missing(args)
        refuse_missing_places(args, PLACES)
        args = {**args, "model": model_folder(args["model"])}
    dataset = None
    is_one = args.get("seeds") is None and not together.shares_base(args)
    if not args.get("print_config") and not args.get("dry_run") and is_one:
        output.say_on_main("\n".join(header.header_lines(args, overrides)))
        dataset = load_prompts(args["dataset"], args, limit=args.get("max_prompts"), live=True)
        output.say_on_main(header.rows_line(dataset))
    from covey.config import GRPOConfig

    config = GRPOConfig(**overrides)
    peft_config = adapter(args)
    refuse_bad_ensemble(args, config)
    if args.get("print_config"):
        from covey.cli.plan import as_yaml

        output.result(as_yaml(overrides, {name: value for name, value in args.items() if name in _CLI_FLAGS}))
        return 0
    if dataset is None:
        dataset = load_prompts(args["dataset"], args, limit=args.get("max_prompts"), live=True)
    if args.get("dry_run"):
        from covey.cli.plan import expect_place, expect_runnable, show

        expect_runnable(config, args, dataset, load_held_out(args))
        if is_one:
            expect_place(config, args)
            refuse_other_options(config, args, dataset)
        show(config, args, overrides, dataset)
        return 0
    if chosen.get("from_run"):
        rerun.refuse_other_run(chosen, config, dataset)
    cli_args = {name: value for name, value in args.items() if name in _CLI_FLAGS}
    if together.shares_base(args):
        by_name = {flag.name: flag for flag in (*other_flags(), *flags())}
        member_of = functools.partial(member, rows=dataset)
        return together.run(args, overrides, cli_args, config_options, member_of, by_name, flag_types())
    if args.get("seeds") is not None:
        return seeds.run(args, overrides, cli_args)
    refuse_other_options(config, args, dataset)
    made = _steps(config, args, dataset, load_held_out(args), peft_config, rerun.recorder(overrides, cli_args))
    return _finish(config, args, made)


def config_options(args: Args, cli_flags: Collection[str] = _CLI_FLAGS, kind: str = "train") -> dict[str, Any]:
    """Flags that the configuration receives, all but `cli_flags`, with the next free run folder where none is named."""
    if args.get("resume") == "auto" and "output_dir" not in args:
        raise ConfigError("--resume auto needs --output-dir, the folder of the run to go on with.")
    overrides = {name: value for name, value in args.items() if name not in cli_flags}
    overrides.setdefault("output_dir", next_folder(kind))
    if args.get("dtype"):
        overrides["model_init_kwargs"] = {**(overrides.get("model_init_kwargs") or {}), "dtype": args["dtype"]}
    return overrides


def refuse_missing(args: Args) -> None:
    """Raise ConfigError for the first missing one of model, dataset and reward."""
    for name in ("model", "dataset", "reward"):
        if name == "reward" and (args.get("environment_factory") or args.get("agent")):
            continue  # an environment or an agent may give the reward itself
        if not args.get(name):
            raise ConfigError(f"--{name} is missing: {next(flag.help for flag in _WHAT if flag.name == name)}")


def refuse_other_options(config: Any, args: Args, dataset: Any) -> None:
    """Raise ConfigError, before the model is loaded, when the run cannot be resumed with these options."""
    from covey.runs import checkpoint
    from covey.runs.resuming import expect_resumable

    resume = args.get("resume", "never")
    if resume == "never":
        return
    place = Path(config.output_dir if resume == "auto" else resume)
    saved = checkpoint.checkpoints(place) or checkpoint.checkpoints(place.parent)
    expect_resumable(saved[-1] if saved else None, config, dataset, tells=False)


def _steps(
    config: Any, args: Args, dataset: Any, eval_dataset: Any, peft_config: Any, record: Any, model: Any = None
) -> Generator[Any, Any, Outcome]:
    """One run, from the trainer's making to its last evaluation; pauses after every step."""
    from covey.training.trainer import GRPOTrainer

    trainer = GRPOTrainer(
        model=args["model"] if model is None else model,
        reward_funcs=list(args.get("reward") or ()) or None,
        args=config,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
        callbacks=[record],
        tools=args.get("tools"),
        environment_factory=args.get("environment_factory"),
        rollout_func=args.get("rollout_func"),
        agent=args.get("agent"),
        ensemble=ensemble_of(args),
    )
    trainer.is_strict = True  # a script that runs twice may set a run aside; a command says so and stops
    trainer.raises_when_stopped = False
    trained = yield from trainer.steps(resume_from_checkpoint=args.get("resume"))
    if trainer.stopped_by:
        return Outcome(trained.global_step, {}, trainer.stopped_by, trainer.exit_code)
    trainer.save_model(str(Path(config.output_dir) / FINAL))
    metrics = {**_last(trainer.state.log_history), **trained.metrics, **_of_best(config, trainer.state)}
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry]
    if eval_dataset is not None and max(evaluated, default=-1) < trained.global_step:
        metrics |= trainer.evaluate()
    has_trained, tells = trained.global_step > trainer.started_at, trainer.is_world_process_zero()
    return Outcome(trained.global_step, metrics, has_trained=has_trained, tells=tells)


def _finish(config: Any, args: Args, steps: Generator[Any, Any, Outcome]) -> int:
    """Train one run alone, and say how it ended."""
    from covey.training.loop import to_the_end

    ended = to_the_end(steps)
    if ended.stopped_by:
        again = resume_command(sys.argv, config.output_dir)
        output.say(f"Stopped by {ended.stopped_by} after step {ended.steps}; go on with: {again}")
        return ended.exit_code
    if ended.tells:
        _report(config, args, ended.steps, ended.metrics, has_trained=ended.has_trained)
    return 0


def member(args: Args, base: Any, rows: Any) -> Generator[Any, Any, Outcome]:
    """One of several runs on one base, as `covey train` alone would make it; resumes where it stopped."""
    from covey.config import GRPOConfig

    overrides = config_options(args)
    config = GRPOConfig(**overrides)
    held_out = load_held_out(args)
    refuse_other_options(config, args, rows)
    cli_args = {name: value for name, value in args.items() if name in _CLI_FLAGS}
    record = rerun.recorder(overrides, cli_args)
    return (yield from _steps(config, args, rows, held_out, adapter(args), record, model=base))


def _report(config: Any, args: Args, steps: int, metrics: Mapping[str, Any], *, has_trained: bool) -> None:
    if args.get("json"):
        output.result_json(
            {"run": config.output_dir, "steps": steps, "seconds": metrics["train_runtime"], "metrics": metrics}
        )
        return
    if has_trained:
        output.result(f"trained {steps} steps in {metrics['train_runtime']:.0f} s: {config.output_dir}")
    else:
        output.result(f"nothing to do: all {steps} steps of {config.output_dir} are done; --max-steps sets more.")
    for name in ("reward", "kl", "entropy", "completions/mean_length", "eval_reward"):
        if isinstance(metrics.get(name), float):
            output.result(f"  {name:<24}{metrics[name]:.4g}")
    output.say(f"talk to it: covey chat {quote(str(config.output_dir))}")


def _of_best(config: Any, state: Any) -> dict[str, Any]:
    """Scores of the weights of the best evaluation, where the run ends with them."""
    best = state.best_global_step
    named = Path(state.best_model_checkpoint or "")
    if not config.load_best_model_at_end or named.name != f"checkpoint-{best}" or not named.is_dir():
        return {}
    if state.global_step > best:
        output.say(f"The run ends with the weights of step {best}, its best evaluation.")
    metrics = _last([entry for entry in state.log_history if entry["step"] == best])
    return {name: value for name, value in metrics.items() if name.startswith("eval_")}


def _last(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The newest value of each metric."""
    newest: dict[str, Any] = {}
    for entry in history:
        newest |= entry
    newest.pop("step", None)
    return newest


def resume_command(words: Sequence[str], run: str) -> str:
    """The command line that resumes a run, made from its first one."""
    remaining = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("--resume") and before != "--resume"
    ]
    return f"{series.again(remaining, run)} --resume auto"


def load_prompts(named: str, args: Args, limit: int | None, live: bool = False) -> Any:
    """The data set that a flag names, its columns as the other flags say."""
    from covey import data

    columns = column_map(args.get("columns"))
    if args.get("answer_column"):
        columns["answer"] = args["answer_column"]
    return data.load(
        named,
        prompt_column=args.get("prompt_column", "prompt"),
        columns=columns,
        system_prompt=args.get("system_prompt"),
        limit=limit,
        streaming=bool(args.get("streaming")),
        config_name=args.get("dataset_config"),
        live=live,
    )


def load_held_out(args: Args) -> Any:
    """The evaluation set, a mixture whole: of streams it would have rows twice. None without one."""
    from covey.data.mixing import terms

    named = args.get("eval_dataset")
    is_streamed = args.get("streaming") and not terms(named)
    options = {**args, "streaming": is_streamed}
    return load_prompts(named, options, limit=args.get("max_eval_prompts")) if named else None


verb = Verb(
    name="train",
    usage="[CONFIG.yaml | demo] --model MODEL --dataset DATA --reward REWARD [options]",
    sentence="Post-train a language model with GRPO, or any algorithm of its family.",
    examples=(
        "covey train --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl --prompt-column question --reward math",
        "covey train run.yaml --learning-rate 2e-6 --dry-run",
    ),
    flags=flags,
    quiet_flags=other_flags,
    types=early.option_types,
    has_defaults=False,
    hints=HINTS,
    positional=("config",),
    presets=PRESETS,
    run=run,
)
