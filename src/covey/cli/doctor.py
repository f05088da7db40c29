"""`covey doctor`: checks of a run before it starts. It takes the options of `covey train`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from covey.cli import early, output, train
from covey.cli.adapter import adapter
from covey.cli.checkpoints import model_folder
from covey.cli.fields import other_flags
from covey.cli.flags import Flag
from covey.cli.verb import Args, Verb

if TYPE_CHECKING:
    from covey.doctor import Case

_SAMPLE = Flag(
    name="sample_prompts", help="Prompts that are answered and scored for a trial; 0: no trial.", type=int, default=16, least=0, group="run"
)  # fmt: skip


def run(args: Args) -> int:
    """Print a row for each finding. Exit code 1 when one of them is FAIL."""
    train.refuse_missing(args)
    from covey.doctor import examine

    findings = []
    for finding in examine(case_of(args)):
        findings.append(finding)
        if not args.get("json"):
            output.row(finding.status, finding.area, finding.said, finding.fix)
    counts: Counter[str] = Counter(finding.status for finding in findings)
    if args.get("json"):
        output.result_json(
            {"ok": not counts["FAIL"], "counts": dict(counts), "findings": [vars(finding) for finding in findings]}
        )
    else:
        warnings = "warning" if counts["WARN"] == 1 else "warnings"
        summary = f"{counts['PASS']} passed, {counts['WARN']} {warnings}, {counts['FAIL']} failed: {_verdict(counts)}"
        output.result("\n" + textwrap.fill(summary, output.width()))
    return 1 if counts["FAIL"] else 0


def case_of(args: Args) -> Case:
    """The run that the flags describe, nothing of it loaded yet."""
    from covey.cli.plan import memory_of
    from covey.config import GRPOConfig
    from covey.doctor import Case

    overrides = train.config_options({name: value for name, value in args.items() if name != "sample_prompts"})
    return Case(
        model=model_folder(args["model"]),
        rewards=list(args["reward"]),
        configure=lambda: GRPOConfig(**overrides),
        load_dataset=partial(train.load_prompts, args["dataset"], args, args.get("max_prompts")),
        load_held_out=partial(train.load_held_out, args),
        adapter=partial(adapter, args),
        predict_memory=lambda config, *sizes: memory_of(config, args, *sizes).peak,
        prompts=args.get("sample_prompts", _SAMPLE.default),
    )


def _verdict(counts: Mapping[str, int]) -> str:
    if counts["FAIL"]:
        return "mend what failed before you train."
    return "ready to train; read the warnings." if counts["WARN"] else "ready to train."


_APART = {"memory": "covey.cli.doctor_memory", "plan": "covey.cli.doctor_plan"}


class _Doctor(Verb):
    def __call__(self, arguments: Sequence[str]) -> int:
        """`covey doctor memory` and `plan` are subcommands, unless a file has that name; the word may follow options."""
        taking = {flag.spelled for flag in self.flags() if not flag.is_switch} | {"--gpus"}
        places = [i for i, word in enumerate(arguments) if word in _APART and not (i and arguments[i - 1] in taking)]
        if not places or Path(arguments[places[0]]).exists():
            return super().__call__(arguments)
        place = places[0]
        verb: Verb = import_module(_APART[arguments[place]]).verb
        return verb([*arguments[:place], *arguments[place + 1 :]])


verb = _Doctor(
    name="doctor",
    usage="[memory | plan] [CONFIG.yaml | demo] --model MODEL --dataset DATA --reward REWARD [options of covey train]",
    sentence="Check a run before you pay for it: machine, model, data, rewards, memory, time, and whether it would learn. "
    "covey doctor memory: memory alone, without data or reward; covey doctor plan: memory and time on GPUs that are not here. "
    "Each has its own --help.",
    examples=(
        "covey doctor demo",
        "covey doctor run.yaml --sample-prompts 64 --json",
        "covey doctor memory --model Qwen/Qwen2.5-0.5B-Instruct",
        "covey doctor plan --model Qwen/Qwen2.5-7B --gpus 8xH100 --fsdp true",
    ),
    flags=partial(train.planning_flags, _SAMPLE),
    quiet_flags=other_flags,
    types=early.option_types,
    has_defaults=False,
    hints={
        **train.HINTS,
        "seeds": "One run is checked; the others differ only in their seed.",
        "from_run": "Give its options: covey doctor runs/x/train.yaml --output-dir runs/new.",
    },
    positional=("config",),
    presets={**train.PRESETS, "memory": {}, "plan": {}},
    run=run,
)
