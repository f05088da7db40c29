"""`covey doctor plan`: memory and seconds of a step on GPUs that are not here, and cheaper set-ups."""

from __future__ import annotations

import textwrap
import warnings
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from covey.cli import doctor_cluster, output, train
from covey.cli.adapter import adapter, adapter_to_train
from covey.cli.flags import Flag
from covey.cli.verb import Args
from covey.errors import ConfigError

if TYPE_CHECKING:
    from covey.doctor.roofline.answers import Answer
    from covey.doctor.roofline.estimate import Estimate, Setup

_FLAGS = (
    Flag(name="gpus", help="Number and kind of the GPUs: 8xH100, 2xA100-40GB, L4.", group="run"),
    Flag(name="cluster", help="Number and kind of the GPUs, to list the combinations that fit them: 2x8xH100.", group="run"),
    Flag(name="rollout_gpus", help="GPUs of the plan that a vLLM server has.", type=int, group="run"),
    Flag(name="host_gib", help="Host memory of a node in GiB, which shards in host memory must fit; left out: not judged.", type=float, group="run"),
    Flag(name="prompt_tokens", help="Tokens of a prompt.", type=int, default=512, least=1, most=2**24, group="run"),
    Flag(name="mean_completion_tokens", help="Mean tokens of a completion; left out: all are as long as allowed.", type=float, least=1, group="run"),
)  # fmt: skip


def run(args: Args) -> int:
    """Print the plan. Exit code 1 where the run does not fit."""
    if args.get("cluster") and args.get("gpus"):
        raise ConfigError("--cluster lists combinations, and --gpus plans one of them; leave one out.")
    for name, example in (("model", "Qwen/Qwen2.5-7B"), ("gpus", "8xH100")):
        if not args.get(name) and not (name == "gpus" and args.get("cluster")):
            raise ConfigError(f"--{name} is missing, such as covey doctor plan --{name} {example}.")
    if args.get("cluster"):
        return doctor_cluster.show(setup_of(doctor_cluster.plain(args)), _lora(), is_json=bool(args.get("json")))
    setup = setup_of(args)
    from covey.doctor.roofline.answers import answers, rows_that_fit
    from covey.doctor.roofline.estimate import estimate

    output.say("computing steps from shapes alone, which takes a core some ten seconds")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT calls
        plan = estimate(setup)
        rows, changes = rows_that_fit(plan), list(answers(plan, _lora()))
    if args.get("json"):
        output.result_json(_as_json(plan, rows, changes))
    else:
        _show(plan, rows, changes)
    return 0 if plan.fits else 1


def setup_of(args: Args) -> Setup:
    """The run and its GPUs, from the options of this verb. Raises ConfigError for what a plan does not cover."""
    from covey.doctor.roofline.gpus import gpus

    count, gpu = gpus(args.get("cluster") or args["gpus"])
    host = args.get("host_gib")
    if host is not None and not 0 < host < 2**20:
        raise ConfigError(f"--host-gib {host:g} is no memory of a node; give GiB above 0.")
    from covey.cli.plan import model_config
    from covey.doctor.roofline.estimate import Setup
    from covey.doctor.roofline.options import config_of, division, planned, teachers_of

    verb_flags = {flag.name for flag in _FLAGS}
    config, is_split, offloads = planned(
        train.config_options({name: value for name, value in args.items() if name not in verb_flags})
    )
    if args.get("mean_completion_tokens", 0) > config.max_completion_length:
        raise ConfigError("--mean-completion-tokens is more than --max-completion-length; raise that one too.")
    writers, is_asynchronous = division(config, count, args.get("rollout_gpus"))
    tensor = config.vllm_tensor_parallel_size if config.use_vllm else 1
    if (writers or count) % tensor:
        raise ConfigError(f"--vllm-tensor-parallel-size {tensor} does not divide {writers or count} GPUs.")
    count -= writers
    if count % config.context:
        raise ConfigError(
            f"parallelism_config has cp_size={config.context}, which does not divide {count} GPUs that learn."
        )
    described = config_of(args["model"], config.trust_remote_code, model_config)
    return Setup(
        args=config,
        model_config=described,
        gpu=gpu,
        gpus=count,
        writers=writers,
        engine_gpus=tensor if writers else 1,
        is_asynchronous=is_asynchronous,
        context=config.context,
        teachers=teachers_of(config, described, model_config),
        is_split=is_split and count > 1,
        offloads=offloads and count > 1,
        host_memory=None if host is None else int(host * 2**30),
        adapter=adapter_to_train(args),
        prompt_tokens=args.get("prompt_tokens", 512),
        mean_tokens=args.get("mean_completion_tokens"),
    )


def _lora() -> Any:
    """LoRA of rank 16, to compare with; None where PEFT is not installed."""
    try:
        return adapter({"lora_r": 16})
    except ConfigError:
        return None


def _show(plan: Estimate, rows: int, changes: list[Answer]) -> None:
    from covey.learner.memory_estimate import in_gib

    setup, seconds = plan.setup, plan.seconds
    args, gpu = setup.args, setup.gpu
    split = ", split over all of them" if setup.is_split else ""
    apart = f", and {setup.writers} that only write" if setup.writers else ""
    output.result(
        f"{plan.measurement.size / 1e9:.2f} billion parameters on {setup.gpus} x {gpu.name}{split}{apart}; {plan.completions} completions a step of "
        f"{setup.mean:.0f} tokens (at most {args.max_completion_length}) behind prompts of {setup.prompt_tokens}"
    )
    output.result("\na step, in seconds by the roofline:")
    for name, value in seconds.parts.items() if plan.decoding.room else ():
        if value or name != "teacher":
            output.result(f"  {name:<12}{value:>10.3g}{100 * value / seconds.step:>6.0f}%")
    if seconds.overlaps:
        output.result("  the rollout goes on while the others learn: the longer of the two counts")
    whole = (
        f"{seconds.step:>10.3g}        (rewards come on top)"
        if plan.decoding.room
        else "not known: there is no room for keys and values"
    )
    output.result(f"  {'step':<12}{whole}")
    output.result("\nmemory on each device:")
    for name, value in asdict(plan.held).items():
        if value:
            output.result(f"  {name:<12}{in_gib(value):>12}")
    fits = "fits" if plan.fits_devices else "does not fit"
    output.result(f"  {'peak':<12}{in_gib(plan.held.peak):>12}  of {in_gib(gpu.memory)}: {fits}")
    if plan.writer:
        output.result(f"\nmemory on each device that only writes: {in_gib(plan.writer)}, weights and keys and values")
    if plan.host:
        has = setup.host_memory
        judged = "" if has is None else f" of {in_gib(has)}: {'fits' if plan.fits_hosts else 'does not fit'}"
        output.result(
            f"\nhost memory of each node, for shards, gradients and optimizer state: {in_gib(plan.host)}{judged}"
        )
    limit = "per-device-train-batch-size" if args.max_tokens_per_microbatch is None else "max-tokens-per-microbatch"
    output.result(f"\n{rows_in_words(plan, rows)}; a micro-batch begins with {plan.measurement.rows:,} (--{limit})")
    output.result("\nwhat a change would bring:")
    for answer in changes:
        host = f", {in_gib(answer.host)} in the host memory of each node" if answer.host else ""
        line = f"{'pays' if answer.pays else 'does not pay':<13} {answer.change}: {answer.said}{host}"
        output.result(textwrap.fill(line, output.width(), initial_indent="  ", subsequent_indent=" " * 16))
    output.say("\nBy calculation, from data sheets: docs/plan.md says how near published runs come.")


def rows_in_words(plan: Estimate, rows: int) -> str:
    """Completions of a micro-batch that a device has room for, and what lacks where the host memory alone does."""
    many = (
        f"up to {rows:,} completions fit" if rows > 1 else "one completion fits" if rows else "not one completion fits"
    )
    if plan.fits_devices and not plan.fits_hosts:
        return f"the host memory of a node alone lacks: {many} in a micro-batch on a device"
    return f"{many} in a micro-batch"


def _as_json(plan: Estimate, rows: int, changes: list[Answer]) -> dict[str, Any]:
    setup = plan.setup
    return {
        "ok": plan.fits,
        "parameters": plan.measurement.size,
        "gpu": asdict(setup.gpu),
        "gpus": plan.gpus,
        "writers": setup.writers,
        "memory_of_a_writer": plan.writer,
        "is_split": setup.is_split,
        "offloads": setup.offloads,
        "host_memory": plan.host,
        "host_memory_available": setup.host_memory,
        "completions_a_step": plan.completions,
        "seconds": {**plan.seconds.parts, "step": plan.seconds.step},
        "memory": {**asdict(plan.held), "peak": plan.held.peak, "available": setup.gpu.memory},
        "rows": plan.measurement.rows,
        "rows_that_fit": rows,
        "changes": [asdict(answer) for answer in changes],
    }


verb = replace(
    train.verb,
    name="doctor plan",
    usage="[CONFIG.yaml | demo] --model MODEL --gpus 8xH100 [options of covey train]",
    sentence="Memory and seconds of a step on GPUs that are not here, by calculation: which batch fits, and whether LoRA, more GPUs or "
    "asynchronous rollouts would pay.",
    examples=(
        "covey doctor plan --model Qwen/Qwen2.5-7B --gpus 8xH100 --fsdp true --gradient-accumulation-steps 8",
        "covey doctor plan --model Qwen/Qwen2.5-7B --gpus H100 --lora-r 16 --dtype bfloat16",
        "covey doctor plan --model Qwen/Qwen2.5-32B --cluster 2x8xH100 --mean-completion-tokens 600 --max-completion-length 2048",
        "covey doctor plan run.yaml --gpus 2xA100 --mean-completion-tokens 300 --json",
    ),
    flags=partial(train.planning_flags, *_FLAGS),
    hints={**train.HINTS, "gpu": "Write --gpus H100."},
    run=run,
)
