"""`covey reward train`: a reward model from preference pairs or scored steps, judged on rows that it has not seen."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, JSON, PLACES, Args, Verb
from covey.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

    from covey.rewards.preference import Pair, PreferenceOptions
    from covey.rewards.steps import ScoredSteps

    Examples = list[ScoredSteps] | list[Pair]

_FLAGS = (
    Flag(name="model", help="Model to start from: a language model (it gets a new head) or a reward model; a folder, a hub id, or demo.", group="what"),
    Flag(name="dataset", help="Pairs with the columns prompt, chosen, rejected, as covey export pairs writes them, or scored steps: prompt, completions, labels; a file, a folder or a hub id.", group="what"),
    Flag(name="output", short="o", help="Folder for the reward model; it must not exist.", group="what"),
    Flag(name="eval_dataset", help="Held-out rows; left out: a share of --dataset.", group="what"),
    Flag(name="held_out", help="Share of the rows that is kept from training to be judged on, whole prompts at a time.", type=float, default=0.1, group="what"),
    CONFIG,
    Flag(name="num_train_epochs", help="Passes over the rows.", type=float, default=1.0, group="training"),
    Flag(name="max_steps", help="Updates; -1: as many as --num-train-epochs takes.", type=int, default=-1, group="training"),
    Flag(name="per_device_train_batch_size", help="Pairs, or completions with scored steps, of an update.", type=int, default=16, group="training"),
    Flag(name="learning_rate", help="Peak learning rate, of all weights.", type=float, default=1e-5, group="training"),
    Flag(name="center_rewards_coefficient", help="Weight of the squared sum of a pair's rewards, which keeps them around 0.", type=float, default=0.0, group="training"),
    Flag(name="step_separator", help="With scored steps: text after each step; left out: a line break.", group="training"),
    Flag(name="aggregate", help="With scored steps: score of a completion from its steps': min, prod or mean; left out: min.", group="training"),
    Flag(name="seed", help="Seed of the head, the order and what is held out.", type=int, default=0, group="training"),
    Flag(name="use_cpu", help="Use the CPU even where there is an accelerator.", type=bool, default=False, group="training"),
    JSON,
)  # fmt: skip
REPORT = "reward_training.json"


def run(options: dict[str, Any]) -> int:
    """Train, judge and save. Exit code 0."""
    _check(options)
    import torch

    from covey.rewards.preference import Pair, PreferenceOptions

    hyperparameters = {
        flag.name: options[flag.name] for flag in _FLAGS if flag.name in PreferenceOptions.__dataclass_fields__
    }
    how = PreferenceOptions(**hyperparameters)
    rows, held = _examples(options)
    torch.manual_seed(options["seed"])
    accelerator = None if options["use_cpu"] else torch.accelerator.current_accelerator()
    device = torch.device("cpu") if accelerator is None else accelerator
    what = "pairs" if isinstance(rows[0], Pair) else "completions"
    output.say(f"model       {options['model']}\n{what:<12}{len(rows)} to learn from, {len(held)} held out")
    folder = Path(options["output"])
    started = time.monotonic()

    def report_progress(step: int, total: int, loss: float) -> None:
        if step == 1 or step == total or step % max(1, total // 10) == 0:
            left = (time.monotonic() - started) / step * (total - step)
            output.say(f"step {step}/{total}  loss {loss:.3f}  {left:.0f} s left")

    learn: Any = _learn_pairs if isinstance(rows[0], Pair) else _learn_steps
    judged, sentence = learn(options, folder, device, rows, held, how, report_progress)
    result = {
        **judged,
        "held_out": len(held),
        what: len(rows),
        "model": options["model"],
        "dataset": options["dataset"],
        **hyperparameters,
    }
    (folder / REPORT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options["json"]:
        output.result_json({"output": str(folder), **result})
        return 0
    output.result(f"{folder}: {sentence}")
    if judged["interval"][0] <= 0.5:
        output.result(
            f"No better than a coin can be ruled out: give more {what}, more epochs or another learning rate."
        )
    named = folder if len(folder.parts) > 1 else f"./{folder}"  # a bare word may be a built-in reward's name
    output.say(f"try it: covey reward test --reward {named}\nuse it: covey train ... --reward {named}")
    return 0


def _learn_pairs(
    options: Args,
    folder: Path,
    device: torch.device,
    rows: list[Pair],
    held: list[Pair],
    how: PreferenceOptions,
    on_step: Any,
) -> tuple[dict[str, Any], str]:
    """A Bradley-Terry model, saved in `folder`: numbers on the held-out pairs, those of a prompt together, and a sentence."""
    from covey.evaluation.intervals import bounded_mean
    from covey.rewards import preference

    reward = preference.load_classifier(options["model"], device)
    preference.train(reward, rows, how, on_step)
    judged = preference.judge(reward, held)
    accuracy = bounded_mean([fmean(pairs) for pairs in preference.by_prompt(held, judged.right)])
    folder.mkdir(parents=True)
    preference.save(reward, folder)
    numbers = {
        "accuracy": accuracy.value,
        "interval": [accuracy.low, accuracy.high],
        "held_out_prompts": accuracy.count,
        "loss": judged.loss,
    }
    over = f", averaged over {accuracy.count} prompts" if accuracy.count < len(held) else ""
    sentence = (
        f"right on {accuracy.value:.0%} (95% {accuracy.low:.0%} to {accuracy.high:.0%}) of {len(held)} held-out pairs{over}, "
        f"loss {judged.loss:.3f}"
    )
    return numbers, sentence


def _learn_steps(
    options: Args,
    folder: Path,
    device: torch.device,
    rows: list[ScoredSteps],
    held: list[ScoredSteps],
    how: PreferenceOptions,
    on_step: Any,
) -> tuple[dict[str, Any], str]:
    """A process reward model, saved in `folder`: numbers on the steps of the held-out completions, and a sentence."""
    from covey.cli.reward_steps import as_json, in_words, judged
    from covey.rewards import preference, steps
    from covey.rewards.builtin.process_reward import SEPARATOR

    aggregate = options["aggregate"] or "min"
    separator = options["step_separator"] or SEPARATOR
    reward = steps.load_step_classifier(options["model"], device, separator=separator, aggregate=aggregate)
    steps.train(reward, rows, how, on_step)
    calibration = judged(reward, held)
    folder.mkdir(parents=True)
    preference.save(reward.frozen, folder)
    settings = {"aggregate": aggregate, "step_separator": separator}
    return {**as_json(calibration), "interval": [calibration.auc.low, calibration.auc.high], **settings}, in_words(
        calibration
    )


def _check(options: dict[str, Any]) -> None:
    if Path(options["output"]).exists():
        raise ConfigError(f"{options['output']} is there already; give another --output.")
    if options["eval_dataset"] is None and not 0 < options["held_out"] < 1:
        raise ConfigError(f"--held-out {options['held_out']} must be between 0 and 1, or give --eval-dataset.")
    from covey.rewards.builtin.process_reward import AGGREGATES

    if options["aggregate"] not in (None, *AGGREGATES):
        raise ConfigError(f"--aggregate {options['aggregate']} is not known; use {', '.join(AGGREGATES)}.")


def _examples(options: dict[str, Any]) -> tuple[Examples, Examples]:
    """Rows to learn from, and others to be judged on."""
    from covey.rewards.preference import parted_by_prompt
    from covey.rewards.steps import load_examples

    rows: Any = load_examples(options["dataset"])
    if options["eval_dataset"] is not None:
        held: Any = load_examples(options["eval_dataset"])
        if rows and held and type(rows[0]) is not type(held[0]):
            raise DataError(
                "One of --dataset and --eval-dataset has pairs, the other scored steps; give two of a kind."
            )
        seen = set(map(repr, rows))
        if repeated := sum(repr(row) in seen for row in held):
            raise DataError(
                f"{repeated} of the {len(held)} rows of --eval-dataset are in --dataset too; hold out others."
            )
    else:
        rows, held = parted_by_prompt(rows, options["held_out"], options["seed"])
    if not rows or not held:
        raise DataError(
            f"{options['dataset']} leaves {len(rows)} rows to learn from and {len(held)} held out; give more prompts."
        )
    is_pairs = type(rows[0]).__name__ == "Pair"
    if is_pairs and (options["step_separator"] or options["aggregate"]):
        raise ConfigError("--step-separator and --aggregate belong to scored steps; the data set has pairs.")
    if not is_pairs and options["center_rewards_coefficient"]:
        raise ConfigError("--center-rewards-coefficient belongs to pairs; the data set has scored steps.")
    return rows, held


verb = Verb(
    name="reward train",
    usage="--model MODEL --dataset ROWS -o FOLDER [options]",
    sentence="Trains a reward model on preference pairs (Bradley-Terry), or a process reward model on scored steps, and judges it on held-out rows.",
    flags=lambda: _FLAGS,
    needs={flag.name: f"--{flag.name}: {flag.help}" for flag in _FLAGS if flag.name in ("model", "dataset", "output")},
    places=PLACES,
    run=run,
    examples=(
        "covey reward train --model Qwen/Qwen2.5-0.5B-Instruct --dataset pairs.jsonl -o runs/judge",
        "covey reward train --model Qwen/Qwen2.5-0.5B-Instruct --dataset steps.jsonl --aggregate min -o runs/steps",
        "covey train ... --reward runs/judge",
    ),
)
