"""`covey demo`: a small model learns arithmetic word problems by GRPO, on this machine, in minutes, without network."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Verb
from covey.errors import RunFolderError
from covey.files.places import next_folder

if TYPE_CHECKING:
    from covey.evaluation.assessment import Assessment
    from covey.training.trainer import GRPOTrainer

_FLAGS = (
    Flag(name="output_dir", help="Folder of the run; runs/demo-1, runs/demo-2, ... when left out.", group="run"),
    Flag(name="steps", help="Optimizer steps; the shipped settings when left out.", type=int, least=1, group="run"),
    Flag(name="seed", help="Seed of everything random.", type=int, default=0, group="run"),
    Flag(name="held_out", help="Problems of the evaluation before and after.", type=int, default=300, least=1, group="run"),
    Flag(name="resume", help="Folder of an interrupted demo, which is continued.", group="run"),
    JSON,
)  # fmt: skip


def run(options: dict[str, Any]) -> int | None:
    """Evaluate, train, evaluate again, and say what changed."""
    folder = _folder(options)
    say = output.say
    say("\n".join(_header(folder)))
    started = time.perf_counter()
    trainer = _trainer(folder, options)
    answers: dict[int, list[Any]] = {0: [], 1: []}
    before = _assess(trainer, options, answers[0].extend, from_start=True)
    say(f"before: {_percent(before)} right on {len(before.greedy)} held-out problems")
    trainer.raises_when_stopped = False
    result = trainer.train(resume_from_checkpoint=options["resume"])
    if trainer.stopped_by is not None:
        say(f"\nstopped after step {result.global_step}, and saved. Go on with: covey demo --resume {folder}")
        return trainer.exit_code
    trainer.save_model(str(folder / "model"))
    after = _assess(trainer, options, answers[1].extend)
    _record(folder, {0: (before, answers[0]), result.global_step: (after, answers[1])})
    _conclude(folder, before, after, result.global_step, time.perf_counter() - started, options)
    return None


def _header(folder: Path) -> list[str]:
    """Lines with the model, the task, the run's folder and the batch, read without PyTorch."""
    from covey import demo

    with (demo.model_path() / "model.safetensors").open("rb") as file:
        tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    count = sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")
    group, per_step = demo.DEMO_SETTINGS["num_generations"], demo.DEMO_SETTINGS["per_device_train_batch_size"]
    return [
        f"model: {count / 1e6:.1f}M parameters (shipped)   task: arithmetic word problems",
        f"a step: {per_step // group} prompts x {group} completions = {per_step}   run: {folder}",
    ]


def _folder(options: dict[str, Any]) -> Path:
    """The folder of this run: the one to resume, that of `--output-dir`, or the next free number."""
    if options["resume"]:
        folder = Path(options["resume"])
        if not (folder / "run.json").is_file():
            raise RunFolderError(f"{folder} holds no run to resume; give the folder that an interrupted demo named.")
        return folder
    if options["output_dir"]:
        folder = Path(options["output_dir"])
        if folder.exists() and any(folder.iterdir()):
            raise RunFolderError(
                f"{folder} is not empty; give a new --output-dir, or --resume {folder} to go on with it."
            )
        return folder
    return Path(next_folder("demo"))


def _trainer(folder: Path, options: dict[str, Any]) -> GRPOTrainer:
    from datasets import Dataset

    from covey import GRPOConfig, GRPOTrainer, demo

    settings = dict(demo.DEMO_SETTINGS)
    if options["steps"] is not None:
        settings["max_steps"] = options["steps"]
    args = GRPOConfig(output_dir=str(folder), seed=options["seed"], report_to="none", **settings)
    return GRPOTrainer(
        model=str(demo.model_path()),
        reward_funcs=demo.reward,
        args=args,
        train_dataset=Dataset.from_list(demo.rows("train")),
    )


def _record(folder: Path, by_step: dict[int, tuple[Assessment, list[Any]]]) -> None:
    """Both evaluations in the run's folder, where report, compare and view look for them."""
    from covey.runs import evaluations

    for step, (assessed, answers) in by_step.items():
        metrics = {"eval_reward": assessed.reward.value, "eval_completions/mean_length": assessed.mean_length}
        evaluations.record(folder, step, "eval", metrics, evaluations.rows_of(answers, ["demo"], [1.0]))


def _assess(
    trainer: GRPOTrainer, options: dict[str, Any], keep: Callable[[Sequence[Any]], None], *, from_start: bool = False
) -> Assessment:
    """Greedy answers to the held-out problems, which `keep` receives. `from_start`: of the shipped model, also when a run is resumed."""
    from datasets import Dataset

    from covey import demo
    from covey.data import PromptStream
    from covey.evaluation.assessment import assess
    from covey.models import load_model
    from covey.rewards import Scorer
    from covey.rollout import choose_sampler

    model = load_model(str(demo.model_path())) if from_start else trainer.model
    rows = demo.rows("test")[: options["held_out"]]
    prompts = PromptStream(Dataset.from_list(rows), trainer.processing_class, seed=0, shuffle=False).take(len(rows))
    sampler = choose_sampler(model, trainer.processing_class, eos_ids=trainer.eos_ids)
    return assess(sampler, Scorer([demo.reward]), prompts, max_tokens=trainer.args.max_completion_length, keep=keep)


def _percent(assessment: Assessment) -> str:
    accuracy = assessment.accuracy
    return f"{100 * accuracy.value:.0f}% (95% {100 * accuracy.low:.0f} to {100 * accuracy.high:.0f})"


def _conclude(
    folder: Path, before: Assessment, after: Assessment, steps: int, seconds: float, options: dict[str, Any]
) -> None:
    from covey.evaluation.assessment import compare

    gain = compare(before, after)["accuracy"]
    verdict = "learnt" if gain.is_real and gain.value > 0 else "no gain can be told"
    say = output.result if not options["json"] else output.say
    say("")
    say(f"{'held-out accuracy':<20} {'before':>22} {'after':>22}")
    say(f"{'greedy':<20} {_percent(before):>22} {_percent(after):>22}")
    say(f"{'tokens an answer':<20} {before.mean_length:>22.1f} {after.mean_length:>22.1f}")
    say(f"\n{gain.in_words()}: {verdict}, in {steps} steps and {seconds:.0f} s")
    say(f"talk to it:      covey chat {folder / 'model'}")
    say(f"test it again:   covey eval {folder / 'model'} --dataset demo:test --reward demo")
    say(f"what happened:   {folder / 'metrics.jsonl'}, {folder / 'rollouts'}")
    if options["json"]:
        output.result_json(
            {
                "accuracy_before": before.accuracy.value,
                "accuracy_after": after.accuracy.value,
                "interval_before": [before.accuracy.low, before.accuracy.high],
                "interval_after": [after.accuracy.low, after.accuracy.high],
                "gain": gain.value,
                "gain_interval": [gain.low, gain.high],
                "p_value": gain.p_value,
                "held_out": len(after.greedy),
                "seconds": round(seconds, 2),
                "steps": steps,
                "seed": options["seed"],
                "run": str(folder),
            }
        )


verb = Verb(
    name="demo",
    usage="[options]",
    sentence="Post-train the small model that ships with Covey on arithmetic word problems: no network, no GPU, minutes.",
    flags=lambda: _FLAGS,
    run=run,
    examples=("covey demo", "covey demo --seed 1 --json", "covey demo --resume runs/demo-1"),
)
