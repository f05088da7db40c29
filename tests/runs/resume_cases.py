"""Runs that are stopped in the middle and resumed, beside the same runs left alone: what comes out, compared to the bit.

`python resume_cases.py` runs them all and writes a table; `RANK` and friends set as by a launcher, it is one process of several.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file

from covey import Ensemble, GRPOConfig, GRPOTrainer, Member
from covey import algorithms as alg
from covey.data import mix
from covey.runs import checkpoint

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from forked import Forked, free_port, rank_environment
from kit import tiny_model, tiny_tokenizer

STEPS = 6
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One way to train. It is stopped after `at` steps."""

    name: str
    options: Options = field(default_factory=dict)
    peft: Any = None
    at: int = 3
    data: str = "rows"
    processes: int = 1
    roles: tuple[str, ...] = ()
    """Of an ensemble's members."""


def _lora(**changed: Any) -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **changed)


ALGORITHMS = [Case(f"algorithm: {name}", {"algorithm": name}) for name in alg.PRESETS]
OPTIMIZERS = [
    Case(f"optimizer: {name}", {"optim": name})
    for name in (
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_8bit",
        "adafactor",
        "sgd",
        "rmsprop",
        "adagrad",
        "lion_32bit",
    )
]
SCHEDULES = [
    Case(f"schedule: {name}", {"lr_scheduler_type": name, "warmup_steps": 2})
    for name in ("linear", "cosine", "constant_with_warmup", "inverse_sqrt")
]
ADAPTERS = [
    Case("adapter: LoRA", peft=_lora()),
    Case("adapter: LoRA, with a KL term", {"beta": 0.1}, peft=_lora()),
    Case("adapter: LoRA with dropout", {"disable_dropout": False}, peft=_lora(lora_dropout=0.2)),
    Case("adapter: DoRA", peft=_lora(use_dora=True)),
    Case("adapter: rank-stabilised LoRA and a trained head", peft=_lora(use_rslora=True, modules_to_save=["lm_head"])),
    Case(
        "adapter: IA3",
        peft=IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
    ),
]
SETTINGS = [
    Case("in the middle of num_iterations=3", {"num_iterations": 3}, at=4),
    Case("in the middle of a rollout of 4 steps", {"steps_per_generation": 4, "gradient_accumulation_steps": 1}, at=3),
    Case("gradient accumulation", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    Case("at the end of an epoch", {"num_train_epochs": 2, "max_steps": -1}, at=3),
    Case("a KL term, the model as reference", {"beta": 0.1}),
    Case("a reference that follows", {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}),
    Case("dropout", {"disable_dropout": False}),
    Case("bfloat16", {"bf16": True}),
    Case("gradient checkpointing", {"gradient_checkpointing": True}),
    Case("streaming data", data="stream"),
    Case("a mixture of data sets", data="mixture"),
    Case("dynamic sampling", {"dynamic_sampling": 2}),
    Case("a schedule of reward weights", {"reward_weights": ["linear:1:0:6"]}),
    Case(
        "an adaptive KL coefficient",
        {"algorithm": alg.grpo().replace(kl=alg.KL(alg.k3, coefficient=alg.AdaptiveKL(target=1e-4)))},
    ),
    Case("an adaptive entropy coefficient", {"entropy_coef": 0.01, "use_adaptive_entropy": True}),
    Case("the update guard's memory, roll-backs allowed", {"on_spike": "clip", "on_bad_numbers": "roll_back"}),
    Case(
        "in the middle of a rollout of 4 steps, used twice",
        {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8},
        at=5,
    ),
    Case("a curriculum by a column", {"curriculum": "difficulty"}),
    Case("a curriculum by what was learned", {"curriculum": "frontier"}),
    Case("rewards with running statistics", {"reward_normalization": "running"}),
    Case("evaluation and early stopping", {"eval_strategy": "steps", "eval_steps": 1, "early_stopping_patience": 4}),
    Case("a teacher that is an average", {"algorithm": "sdpo, threshold=0.4, teacher_update_rate=0.3"}),
    Case(
        "adapter: LoRA, with a teacher that is an average", {"algorithm": "sdft, teacher_update_rate=0.3"}, peft=_lora()
    ),
    Case("averaged weights", {"ema_decay": 0.9, "eval_strategy": "steps", "eval_steps": 2}),
    Case("a soup of its own steps", {"soup_steps": 2}),
    Case(
        "an ensemble, in the middle of a rollout of 4 steps",
        {"steps_per_generation": 4, "gradient_accumulation_steps": 1},
        roles=("sibling", "baseline", "rescue"),
    ),
    Case(
        "two processes and an ensemble",
        {"per_device_train_batch_size": 4},
        processes=2,
        roles=("sibling", "baseline", "rescue"),
    ),
    Case("checkpoints that wait for the disk", {"save_async": False}),
    Case("two processes", {"per_device_train_batch_size": 4}, processes=2),
    Case(
        "two processes, with averages of returns by role",
        {"per_device_train_batch_size": 4, "algorithm": "dr_grpo, advantage=RoleConditioned(column='difficulty')"},
        processes=2,
    ),
    Case(
        "two processes, LoRA and a KL term", {"per_device_train_batch_size": 4, "beta": 0.1}, peft=_lora(), processes=2
    ),
]
CASES = {case.name: case for case in (*ALGORITHMS, *OPTIMIZERS, *SCHEDULES, *ADAPTERS, *SETTINGS)}

ALONE = Case("one process", {"max_steps": 4, "optim": "sgd"})
TOGETHER = Case("two processes, plainly", {**ALONE.options, "per_device_train_batch_size": 4}, processes=2)
"""The same steps by one process and by two."""


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [hashlib.sha256(text.encode()).digest()[0] / 256 for text in completions]


def trainer(case: Case, folder: Path, **sizes: int) -> GRPOTrainer:
    """`sizes`: of the model, where they differ from `tiny_model`'s."""
    given: Options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": STEPS,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 2,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "rollout_log_steps": 0,
        "seed": 7,
    }
    rows = [{"prompt": f"Tom has {i} apples.", "difficulty": float(i * 5 % 7)} for i in range(6)]
    data: Any = Dataset.from_list(rows)
    if case.data == "stream":
        data = IterableDataset.from_generator(lambda: iter(rows))
    if case.data == "mixture":
        data = mix({"few": Dataset.from_list(rows[:2]), "many": Dataset.from_list(rows[2:])}, {"few": 1, "many": 2})
    is_evaluated = "eval_strategy" in case.options
    return GRPOTrainer(
        tiny_model("qwen2", **sizes, **({"attention_dropout": 0.1} if case.name == "dropout" else {})),
        reward,
        GRPOConfig(**{**given, **case.options}),
        data,
        eval_dataset=Dataset.from_list(rows[:2]) if is_evaluated else None,
        processing_class=tiny_tokenizer(),
        peft_config=case.peft,
        ensemble=_ensemble(case.roles) if case.roles else None,
    )


def _ensemble(roles: tuple[str, ...]) -> Ensemble:
    """A member for each role; an answer is right for the rescuer from 0.9 on, so that it is asked for some prompts."""
    tokenizer = tiny_tokenizer()
    members = [
        Member(tiny_model("qwen2", seed=3 + i), role=role, name=role, tokenizer=tokenizer)
        for i, role in enumerate(roles)
    ]
    return Ensemble(members, threshold=0.9)


def train(case: Case, folder: Path, resume: Path | None = None) -> None:
    if case.processes == 1 or "RANK" in os.environ:
        trainer(case, folder).train(None if resume is None else str(resume))
        return
    words, port = [__file__, case.name, folder, *([] if resume is None else [resume])], free_port()
    ranks = []
    for rank in range(case.processes):
        place = {**rank_environment(rank, port, case.processes), "ACCELERATE_USE_CPU": "1"}
        ranks.append(Forked(*words, env=place))
    codes = [rank.wait() for rank in ranks]
    assert not any(codes), [rank.err for rank in ranks]


def differences(case: Case, one: Path, other: Path) -> dict[str, float]:
    """What differs between the last checkpoints and the logs of two runs, by name, and by how much; empty: nothing, to the bit."""
    names = sorted((path.name for path in one.glob("checkpoint-*")), key=lambda name: int(name.rpartition("-")[2]))
    found: dict[str, float] = {}
    for file in sorted(path.name for path in (one / names[-1]).glob("*.safetensors")):
        mine, theirs = (load_file(run / names[-1] / file) for run in (one, other))
        if mine.keys() != theirs.keys():
            found[f"{file}: names"] = float("inf")
            continue
        for name in mine:
            if not torch.equal(_bits(mine[name]), _bits(theirs[name])):
                found[f"{file}: {name}"] = float((mine[name].double() - theirs[name].double()).abs().max())
    mine_state, their_state = (_state(run / names[-1]) for run in (one, other))
    for place in mine_state.keys() | their_state.keys():
        if mine_state.get(place) != their_state.get(place):
            found[f"state: {place}"] = float("nan")
    mine_lines, their_lines = (_metrics(run) for run in (one, other))
    for step, line in their_lines.items():
        for name in line.keys() | mine_lines[step].keys():
            if line.get(name) != mine_lines[step].get(name):
                found[f"metrics, step {step}: {name}"] = float("nan")
    return found


def _state(folder: Path) -> dict[str, Any]:
    """Everything else a checkpoint remembers (schedule, random generators, place in the data, history ...), by place; no clocks."""
    flat: dict[str, Any] = {}

    def walk(value: Any, place: str) -> None:
        if any(word in place for word in ("second", "time", "throughput", "memory/", "best_model_checkpoint")):
            return
        if is_dataclass(value):
            value = {item.name: getattr(value, item.name) for item in fields(value)}
        if isinstance(value, Mapping):
            flat[f"{place}: names"] = sorted(map(str, value))
            for key, item in value.items():
                walk(item, f"{place}.{key}")
        elif isinstance(value, list | tuple):
            flat[f"{place}: length"] = len(value)
            for i, item in enumerate(value):
                walk(item, f"{place}.{i}")
        elif not isinstance(value, torch.Tensor):  # those are in the files compared above
            flat[place] = repr(value)

    walk(checkpoint.load_state(folder), "state")
    walk(json.loads((folder / "trainer_state.json").read_text()), "trainer_state")
    return flat


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _metrics(run: Path) -> dict[int, Options]:
    """The lines of metrics.jsonl by step, without clocks."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {k: v for k, v in line.items() if k != "time" and "seconds" not in k and "memory/" not in k} for line in lines
    ]
    return {line["step"]: line for line in kept}


def compare(case: Case, folder: Path) -> dict[str, float]:
    """Run it whole, and again from the checkpoint of its middle; the differences."""
    train(case, folder / "whole")
    train(case, folder / "resumed", folder / "whole" / f"checkpoint-{case.at}")
    return differences(case, folder / "whole", folder / "resumed")


def main() -> None:
    warnings.simplefilter("ignore")
    if "RANK" in os.environ:
        name, folder, *rest = sys.argv[1:]
        train({**CASES, TOGETHER.name: TOGETHER}[name], Path(folder), Path(rest[0]) if rest else None)
        return
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = compare(case, Path(folder))
        told = f"{len(found)} differ: {next(iter(found.items()))}" if found else "bit for bit"
        sys.stdout.write(f"| {name} | {told} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
