"""`covey reward train`: a reward model from preference pairs, and how often it is right on pairs it has not seen."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, JSON, Given, Verb
from covey.errors import ConfigError, DataError

if TYPE_CHECKING:
    from covey.evaluation.intervals import Estimate
    from covey.rewards.preference import Pair

_FLAGS = (
    Flag(name="model", help="Model to start from: a language model (its head starts anew) or a reward model; a folder, a hub id, or demo.", group="what"),
    Flag(name="dataset", help="Pairs with the columns prompt, chosen, rejected, as covey export pairs writes them: a file, a folder or a hub id.", group="what"),
    Flag(name="output", short="o", help="Folder for the reward model; it must not be there yet.", group="what"),
    Flag(name="eval_dataset", help="Held-out pairs; left out: a share of --dataset.", group="what"),
    Flag(name="held_out", help="Share of the pairs that is kept from training to be judged on, whole prompts at a time.", type=float, default=0.1, group="what"),
    CONFIG,
    Flag(name="epochs", help="Passes over the pairs.", type=float, default=1.0, group="training"),
    Flag(name="batch_size", help="Pairs of an update.", type=int, default=16, group="training"),
    Flag(name="learning_rate", help="Peak learning rate, of all weights.", type=float, default=1e-5, group="training"),
    Flag(name="centre", help="Weight of the squared sum of a pair's rewards, which keeps them around 0.", type=float, default=0.0, group="training"),
    Flag(name="seed", help="Seed of the head, the order and what is held out.", type=int, default=0, group="training"),
    Flag(name="use_cpu", help="Use the CPU even where there is an accelerator.", type=bool, default=False, group="training"),
    JSON,
)  # fmt: skip
REPORT = "reward_training.json"


def run(given: Given) -> int:
    """Train, judge and save. Exit code 0."""
    options = {flag.name: flag.default for flag in _FLAGS} | dict(given)
    _check(options)
    import torch

    from covey.evaluation.intervals import proportion
    from covey.rewards import preference

    wanted = {name: options[name] for name in ("epochs", "batch_size", "learning_rate", "centre", "seed")}
    how = preference.PreferenceOptions(**wanted)
    pairs, held = _pairs(options)
    torch.manual_seed(options["seed"])
    found = None if options["use_cpu"] else torch.accelerator.current_accelerator()
    reward = preference.load_classifier(options["model"], torch.device("cpu") if found is None else found)
    output.say(f"model      {options['model']}\npairs      {len(pairs)} to learn from, {len(held)} held out")
    started = time.monotonic()

    def told(step: int, total: int, loss: float) -> None:
        if step == 1 or step == total or step % max(1, total // 10) == 0:
            left = (time.monotonic() - started) / step * (total - step)
            output.say(f"step {step}/{total}  loss {loss:.3f}  {left:.0f} s left")

    preference.train(reward, pairs, how, told)
    judged = preference.judge(reward, held)
    accuracy = proportion(round(judged.num_right), len(held))
    folder = Path(options["output"])
    folder.mkdir(parents=True)
    preference.save(reward, folder)
    result = {
        "accuracy": accuracy.value,
        "interval": [accuracy.low, accuracy.high],
        "held_out": len(held),
        "loss": judged.loss,
        "pairs": len(pairs),
        "model": options["model"],
        "dataset": options["dataset"],
        **wanted,
    }
    (folder / REPORT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _report(options, folder, accuracy, result)
    return 0


def _check(options: dict[str, Any]) -> None:
    for name in ("model", "dataset", "output"):
        if not options[name]:
            raise ConfigError(f"covey reward train needs --{name}: {next(f.help for f in _FLAGS if f.name == name)}")
    if Path(options["output"]).exists():
        raise ConfigError(f"{options['output']} is there already; give another --output.")
    if options["eval_dataset"] is None and not 0 < options["held_out"] < 1:
        raise ConfigError(f"--held-out {options['held_out']} must be between 0 and 1, or give --eval-dataset.")


def _pairs(options: dict[str, Any]) -> tuple[list[Pair], list[Pair]]:
    from covey.rewards.preference import load_pairs, parted_by_prompt

    pairs = load_pairs(options["dataset"])
    if options["eval_dataset"] is not None:
        held = load_pairs(options["eval_dataset"])
        seen = {(repr(pair.prompt), repr(pair.chosen), repr(pair.rejected)) for pair in pairs}
        known = sum((repr(pair.prompt), repr(pair.chosen), repr(pair.rejected)) in seen for pair in held)
        if known:
            raise DataError(
                f"{known} of the {len(held)} pairs of --eval-dataset are in --dataset too; hold out others."
            )
    else:
        pairs, held = parted_by_prompt(pairs, options["held_out"], options["seed"])
    if not pairs or not held:
        raise DataError(
            f"{options['dataset']} leaves {len(pairs)} pairs to learn from and {len(held)} held out; give more prompts."
        )
    return pairs, held


def _report(options: dict[str, Any], folder: Path, accuracy: Estimate, result: dict[str, Any]) -> None:
    if options["json"]:
        output.result_json({"output": str(folder), **result})
        return
    output.result(
        f"{folder}: right on {accuracy.value:.0%} (95% {accuracy.low:.0%} to {accuracy.high:.0%}) of {result['held_out']} held-out "
        f"pairs, loss {result['loss']:.3f}"
    )
    if accuracy.low <= 0.5:
        output.result("No better than a coin can be ruled out: give more pairs, more epochs or another learning rate.")
    named = folder if len(folder.parts) > 1 else f"./{folder}"  # a bare word may be a built-in reward's name
    output.say(f"try it: covey reward test --reward {named}\nuse it: covey train ... --reward {named}")


verb = Verb(
    name="reward train",
    usage="--model MODEL --dataset PAIRS -o FOLDER [options]",
    sentence="Trains a reward model on preference pairs (Bradley-Terry) and tells how often it is right on held-out ones.",
    flags=lambda: _FLAGS,
    run=run,
    examples=(
        "covey reward train --model Qwen/Qwen2.5-0.5B-Instruct --dataset pairs.jsonl -o runs/judge",
        "covey train ... --reward runs/judge",
    ),
)
