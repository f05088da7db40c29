"""`covey doctor plan --cluster`: the combinations that fit a cluster, by the seconds of a step."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import spelled
from covey.cli.verb import Args

if TYPE_CHECKING:
    from covey.doctor.roofline.cluster import Choice
    from covey.doctor.roofline.estimate import Setup

_CHOSEN = (
    *(
        "fsdp",
        "use_vllm",
        "vllm_mode",
        "vllm_tensor_parallel_size",
        "async_rollouts",
        "max_staleness",
        "rollout_workers",
    ),
    *("parallelism_config", "rollout_gpus"),
)
"""Options that the list decides."""
_SHOWN = 12
CALIBRATED = (
    "Calibrated on a card: the native rollout's reads and kernels (one H100, 0.5B). Taken from a published run: the share of the peak "
    "that products get. Arithmetic: everything else, vLLM's rollouts, links, folders and host memory among them; docs/plan.md."
)


def plain(args: Args) -> Args:
    """The options without those that the list decides, which are named."""
    left_out = [name for name in _CHOSEN if args.get(name) is not None]
    if left_out:
        output.say(f"--cluster decides {', '.join(map(spelled, left_out))}; what the run has there is not read")
    return {name: value for name, value in args.items() if name not in _CHOSEN}


def show(setup: Setup, lora: Any, *, is_json: bool) -> int:
    """Print the combinations. Exit code 1 where none fits."""
    from covey.doctor.roofline.cluster import choices, completions_of, nearest, ways

    output.say("computing steps from shapes alone, each way to hold the weights takes a core a few seconds")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT calls
        made = ways(setup, lora)
    plans = choices(setup, made)
    fitting = [choice for choice in plans if choice.plan.fits]
    sentence = None if fitting else nearest(setup, made, plans)
    if is_json:
        facts = {"ok": bool(fitting), "gpu": setup.gpu.name, "gpus": setup.gpus, "nearest": sentence}
        output.result_json({**facts, "tried": len(plans), "combinations": [_as_json(choice) for choice in fitting]})
        return 0 if fitting else 1
    if sentence is not None:
        output.result(sentence)
        return 1
    output.result(
        f"{len(fitting)} of {len(plans)} combinations fit {setup.gpus} x {setup.gpu.name}; {completions_of(setup):,} completions a step of "
        f"{setup.mean:.0f} tokens (at most {setup.args.max_completion_length}) behind prompts of {setup.prompt_tokens}\n"
    )
    for line in _table(fitting[:_SHOWN]):
        output.result(line)
    if len(fitting) > _SHOWN:
        output.result(f"... and {len(fitting) - _SHOWN} slower ones (--json has all)")
    best = fitting[0]
    learners, writers = best.plan.setup.gpus, best.plan.setup.writers
    served = f", and a vLLM server (covey serve-vllm) on {writers}" if best.options.get("vllm_mode") == "server" else ""
    noun = "process" if learners == 1 else "processes"
    output.result(f"\nthe first as options of covey train, on {learners} {noun}{served}:")
    for name, value in best.options.items():
        output.result(f"  {name}: {json.dumps(value) if isinstance(value, bool | dict) else value}")
    output.say(f"\n{CALIBRATED}")
    return 0


def _table(fitting: list[Choice]) -> list[str]:
    from covey.learner.memory_estimate import in_gib

    lines = [
        f"{'step, s':>9}{'rollout':>9}{'learn':>9}{'teacher':>9}{'weights':>9}{'a GPU':>11}{'host, node':>12}  combination"
    ]
    for choice in fitting:
        seconds, host = choice.plan.seconds, choice.plan.host
        numbers = (seconds.step, seconds.rollout, seconds.scoring + seconds.update, seconds.teacher, seconds.sync)
        cells = "".join(f"{number:>9.3g}" for number in numbers)
        lines.append(f"{cells}{in_gib(choice.memory):>11}{in_gib(host) if host else '':>12}  {choice.name}")
    return lines


def _as_json(choice: Choice) -> dict[str, Any]:
    plan = choice.plan
    return {
        "features": choice.features,
        "learners": plan.setup.gpus,
        "writers": plan.setup.writers,
        "seconds": {**plan.seconds.parts, "step": plan.seconds.step},
        "memory": choice.memory,
        "host_memory": plan.host,
        "options": dict(choice.options),
    }
