"""`covey eval`: how good a model is on a set of prompts, with intervals; and whether another one is better."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag, spelled
from covey.cli.verb import CONFIG, JSON, Verb
from covey.errors import ConfigError
from covey.files.places import refuse_missing

if TYPE_CHECKING:
    from covey.evaluation.assessment import Assessment

_FLAGS = (
    Flag(name="dataset", help="Prompts: a file, a folder or a hub id, optionally with :split; demo for the demo's.", group="data"),
    Flag(name="reward", help="Built-in name or import path that scores an answer; may be repeated.", type="list[str]", group="data"),
    Flag(name="reward_weights", help="Weight of each reward; 1 each when left out.", type="list[float]", group="data"),
    Flag(name="prompt_column", help="Column that holds the prompt.", default="prompt", group="data"),
    Flag(name="columns", help="Rename columns: new=old, so that a reward finds them.", type="list[str]", group="data"),
    Flag(name="system_prompt", help="System message put before every prompt.", group="data"),
    Flag(name="max_prompts", help="Use only the first N rows.", type=int, group="data"),
    Flag(name="num_samples", help="Answers drawn a prompt, beside the greedy one; 0: greedy only.", type=int, default=0, least=0, group="answers"),
    Flag(name="k", help="pass@k for each of these k; needs --num-samples.", type="list[int]", group="answers"),
    Flag(name="temperature", help="Sampling temperature of the drawn answers.", type=float, default=1.0, group="answers"),
    Flag(name="top_p", help="Nucleus of the drawn answers.", type=float, default=1.0, group="answers"),
    Flag(name="max_tokens", help="Most tokens of an answer.", type=int, default=256, least=1, group="answers"),
    Flag(name="threshold", help="An answer is right from this reward on.", type=float, default=0.5, group="answers"),
    Flag(name="seed", help="Seed of the drawn answers.", type=int, default=0, group="answers"),
    Flag(name="device", help="Where the model computes, such as cpu or cuda:1; left out: this machine's accelerator, else the CPU.", group="answers"),
    Flag(name="batch_size", help="Answers in flight at a time.", type=int, default=128, least=1, group="answers"),
    Flag(name="compare_to", help="Another model: tests whether it is better, prompt by prompt.", group="comparison"),
    Flag(name="ensemble", help="More models that answer in addition to the first: paths, hub ids or endpoints, as in runs/b,samples=4; a vote picks the answer.", type="list[str]", group="ensemble"),
    Flag(name="vote", help="With --ensemble: majority, weighted (by the judge's reward) or best (by the judge); best with --judge, else majority.", group="ensemble"),
    Flag(name="judge", help="With --ensemble: reward by name or import path that weighted and best go by; may be repeated.", type="list[str]", group="ensemble"),
    Flag(name="answers", help="Write every greedy answer and its score to this JSONL file.", group="output"),
    JSON,
    CONFIG,
)  # fmt: skip


def run(options: dict[str, Any]) -> None:
    """Evaluate one model or two, print a table or JSON."""
    _check(options)
    if options["ensemble"]:
        from covey.cli.ensemble import evaluate

        evaluate(options)
        return
    if not options["answers"]:
        _evaluate(options, None)
        return
    from covey.runs.storage import whole_file

    with whole_file(Path(options["answers"]).expanduser()) as answers:
        _evaluate(options, answers)


def _evaluate(options: dict[str, Any], answers: Path | None) -> None:
    first = assess_model(options["model"], options)
    result: dict[str, Any] = {"model": options["model"], "dataset": options["dataset"], **first.summary(_ks(options))}
    second = None
    if options["compare_to"]:
        from covey.evaluation.assessment import compare, summary_of

        second = assess_model(options["compare_to"], options)
        result["compared_to"] = {"model": options["compare_to"], **second.summary(_ks(options))}
        differences = compare(first, second)
        result["difference"] = {**summary_of(differences), "of": options["compare_to"], "minus": options["model"]}
    if answers is not None:
        _write_answers(answers, first)
    if options["json"]:
        output.result_json(result)
        return
    _table(options, first, second)
    if second is not None:
        for name, difference in differences.items():
            scale, unit = (100.0, "points") if name == "accuracy" else (1.0, "reward")
            output.result(
                f"{name} of {options['compare_to']} (--compare-to) minus that of {options['model']}: {difference.in_words(unit, scale)}"
            )


def _check(options: dict[str, Any]) -> None:
    if not options.get("model") and options["ensemble"]:
        raise ConfigError("--ensemble names the other members; the first comes before it: covey eval A --ensemble B C.")
    if not options.get("model"):
        raise ConfigError(
            "covey eval needs a model: covey eval runs/demo-1/checkpoint-60 --dataset demo --reward demo."
        )
    for name in ("dataset", "reward"):
        if not options[name]:
            raise ConfigError(f"covey eval needs --{name}; see covey eval --help.")
    _check_ensemble(options)
    if not options["ensemble"]:  # a member carries options of its own
        refuse_missing(options["model"], "model folder")
    if options["k"] and min(options["k"]) < 1:
        raise ConfigError(f"pass@{min(options['k'])} is no share of samples; give --k 1 or more.")
    if options["k"] and max(options["k"]) > options["num_samples"]:
        raise ConfigError(f"pass@{max(options['k'])} needs --num-samples {max(options['k'])} or more.")


def _check_ensemble(options: dict[str, Any]) -> None:
    for name in ("vote", "judge"):
        if options[name] and not options["ensemble"]:
            raise ConfigError(f"--{name} belongs to --ensemble, which names the other models.")
    plain = defaults()
    for name in ("num_samples", "k", "compare_to", "answers", "device", "batch_size"):
        if options["ensemble"] and options[name] != plain[name]:
            raise ConfigError(
                f"{spelled(name)} does not apply with --ensemble, whose members say samples=N and answer on this machine's GPU, else its CPU; leave it out."
            )


def _ks(options: dict[str, Any]) -> list[int]:
    """The ks of `--pass-at`, or 1 and all powers of two up to the number of samples."""
    samples = options["num_samples"]
    return list(options["k"] or [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= samples])


def _answers(samples: int) -> str:
    return f"1 greedy and {samples} drawn answers" if samples else "1 greedy answer"


def defaults() -> dict[str, Any]:
    """Every option of `covey eval` by name."""
    return {flag.name: flag.default for flag in _FLAGS}


def assess_model(model_name: str, options: dict[str, Any], *, called: str | None = None) -> Assessment:
    """Answers of a model to the prompts of `options`, scored. `called`: its name in the line that is shown; None: `model_name`."""
    from covey.cli.checkpoints import model_folder
    from covey.cli.columns import evaluated_dataset
    from covey.data import PromptStream, eos_ids, prepare_tokenizer
    from covey.environments.messages import with_messages
    from covey.evaluation.assessment import assess
    from covey.models import context_limit, load_model, reads_media
    from covey.models.modalities import load_processing
    from covey.process.device import choose_device, dtype_to_read_in, in_words
    from covey.rewards import Scorer
    from covey.rollout import SamplingParams, choose_sampler

    dataset = evaluated_dataset(options)
    device = choose_device(options["device"])
    scorer = Scorer.of(options["reward"], options["reward_weights"], device=device)
    scorer.check(dataset.column_names)
    folder = model_folder(model_name)
    model = load_model(folder, {"dtype": dtype_to_read_in(device)}).to(device)
    processing = load_processing(model, folder)
    tokenizer = prepare_tokenizer(processing, model)
    scorer.read = partial(with_messages, tokenizer=tokenizer)
    processor = processing if processing is not tokenizer and reads_media(model) else None
    limit = context_limit(model)
    room = None if limit is None else limit - options["max_tokens"]
    stream = PromptStream(
        dataset, tokenizer, processor=processor, shuffle=False, keeps_shares=False, max_prompt_length=room
    )
    sampler = choose_sampler(model, tokenizer, eos_ids=eos_ids(model, tokenizer))
    output.say(
        f"{called or model_name}: {len(dataset)} prompts, {_answers(options['num_samples'])} each, on {in_words(device)} ..."
    )
    return assess(
        sampler,
        scorer,
        stream.take(len(dataset)),
        max_tokens=options["max_tokens"],
        num_samples=options["num_samples"],
        sampling=SamplingParams(temperature=options["temperature"], top_p=options["top_p"]),
        seed=options["seed"],
        threshold=options["threshold"],
        batch_size=options["batch_size"],
    )


def _table(options: dict[str, Any], first: Assessment, second: Assessment | None) -> None:
    names = [options["model"]] + ([options["compare_to"]] if second else [])
    for name, assessment in zip(names, [first] + ([second] if second else []), strict=True):
        output.result(f"{name} on {options['dataset']} ({len(assessment.greedy)} prompts)")
        rows = [("accuracy, greedy", assessment.accuracy, 100.0, "%"), ("reward, greedy", assessment.reward, 1.0, "")]
        if assessment.sampled:
            rows.append(("reward, drawn", assessment.sampled_reward, 1.0, ""))
            rows += [(f"pass@{k}", assessment.pass_at(k), 100.0, "%") for k in _ks(options)]
        for label, estimate, scale, unit in rows:
            value, low, high = scale * estimate.value, scale * estimate.low, scale * estimate.high
            output.result(f"  {label:<18} {value:7.3f}{unit}  (95% {low:.3f} to {high:.3f})")
        output.result(f"  {'tokens, greedy':<18} {assessment.mean_length:7.1f}")


def _write_answers(path: Path, assessment: Assessment) -> None:
    from covey.runs.storage import write_text

    lines = [
        json.dumps({"answer": text, "reward": None if reward != reward else reward})
        for text, reward in zip(assessment.texts, assessment.greedy, strict=True)
    ]
    write_text(path, "\n".join(lines) + "\n")


verb = Verb(
    name="eval",
    usage="MODEL --dataset DATA --reward REWARD [options]",
    sentence="Accuracy, reward and pass@k on a set of prompts, with 95% intervals; two models with a paired test.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("model",),
    places={"dataset": "data set", "compare_to": "model folder"},
    examples=(
        "covey eval demo --dataset demo:test --reward demo",
        "covey eval runs/x/checkpoint-100 --dataset test.jsonl --reward math --num-samples 8 --compare-to demo",
        "covey eval runs/a,samples=4 --ensemble runs/b,samples=4 --dataset test.jsonl --reward math --vote majority",
    ),
)
