"""How often alerts speak: healthy runs of the demo's task, where each warning is a false alarm, and real faults, which must be seen.

    python benchmarks/alarms.py --seeds 20 --steps 100
    python benchmarks/alarms.py --replay runs/*        # what today's detectors say of the metrics of finished runs

Every run is a whole one, with sampling, rewards, updates and evaluations. Healthy runs end in a solved task or a plateau: what is told
of severity "info" is counted apart. Each fault is planted where it would be in life: in the options, the rewards or the data.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, demo
from covey.models import load_model
from covey.monitor.detectors import standard
from covey.monitor.watch import Watch
from covey.types import Event, Last, StepReport

Rewards = list[Callable[..., list[float]]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of run. `expects`: the rules of which at least one must speak; none for a healthy run."""

    expects: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    rewards: Callable[[], Rewards] = lambda: [demo.reward]
    rows: Callable[[int, int], list[dict[str, Any]]] = lambda n, seed: demo.rows("train", n, seed)


def zeros(completions: list[Any], **kwargs: Any) -> list[float]:
    """A parser that never matches."""
    return [0.0] * len(completions)


def letters(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that pays for length."""
    return [len(str(completion)) / 50 for completion in completions]


def failing(completions: list[Any], **kwargs: Any) -> list[float]:
    """A judge that answers for every other completion; one that answers for none ends the run at its first batch."""
    if any(zlib.crc32(str(completion).encode()) % 2 for completion in completions):
        raise ConnectionError("the judge is down")
    return [0.0] * len(completions)


def polite(row: dict[str, Any]) -> dict[str, Any]:
    """The same problem in more words."""
    (question,) = row["prompt"]
    return {**row, "prompt": [{**question, "content": "Please tell me now, if you can: " + question["content"]}]}


HEALTHY = {
    "demo": Case(),
    "demo, beta=0.02": Case(options={"beta": 0.02}),
    "demo, half the learning rate": Case(options={"learning_rate": 3e-4}),
}
FAULTS = {
    "a reward that never matches": Case(expects=("dead_groups",), rewards=lambda: [zeros]),
    "learning rate times 50": Case(
        expects=("large_updates",),
        options={"learning_rate": 3e-2},
    ),
    "learning rate over 10,000": Case(expects=("tiny_updates",), options={"learning_rate": 6e-8}),
    "room for 8 tokens": Case(expects=("truncation",), options={"max_completion_length": 8}),
    "a reward for length, audited": Case(
        expects=("reward_hacking", "length_explosion"), rewards=lambda: [letters, demo.reward], options={"reward_weights": [1.0, 0.0]}
    ),
    "a reward that raises": Case(
        expects=("reward_errors",), rewards=lambda: [demo.reward, failing], options={"reward_error_limit": 10**6}
    ),
    "other prompts from the middle on": Case(
        expects=("data_drift",),
        options={"shuffle_dataset": False},
        rows=lambda n, seed: [row if i < n // 2 else polite(row) for i, row in enumerate(demo.rows("train", n, seed))],
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="healthy runs of each kind")
    parser.add_argument("--first-seed", type=int, default=0, help="to share the work between processes")
    parser.add_argument("--fault-seeds", type=int, default=3, help="runs of each fault")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, 8 completions each")
    parser.add_argument(
        "--replay", nargs="+", type=Path, help="run folders whose metrics.jsonl are shown to the detectors"
    )
    parser.add_argument("--only", nargs="+", choices=[*HEALTHY, *FAULTS], help="these kinds of runs alone")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON file")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    if given.replay:
        print(table([(str(folder), [replay(folder)]) for folder in given.replay], given.steps))
        return
    wanted = given.only or [*HEALTHY, *FAULTS]
    healthy = [(name, runs(case, given, given.seeds)) for name, case in HEALTHY.items() if name in wanted]
    faults = [(name, runs(case, given, given.fault_seeds)) for name, case in FAULTS.items() if name in wanted]
    if healthy:
        print(table(healthy, given.steps))
    if faults:
        print(fault_table(faults))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "alarms.json").write_text(json.dumps({"healthy": healthy, "faults": faults}, indent=1))


Alerts = list[dict[str, Any]]


def runs(case: Case, given: argparse.Namespace, seeds: int) -> list[Alerts]:
    """The alerts of each seed."""
    return [one_run(case, given, seed) for seed in range(given.first_seed, given.first_seed + seeds)]


def one_run(case: Case, given: argparse.Namespace, seed: int) -> Alerts:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            **demo.DEMO_SETTINGS, "output_dir": folder, "max_steps": given.steps, "per_device_train_batch_size": 8 * given.prompts,
            "save_strategy": "no", "rollout_log_steps": 0, "report_to": "none", "disable_tqdm": True, "log_level": "error",
            "eval_strategy": "steps", "eval_steps": max(1, given.steps // 10), "eval_on_start": True, "seed": seed,
            "num_generations_eval": 1, "per_device_eval_batch_size": 64, "logging_steps": 1000, **case.options,
        }  # fmt: skip
        trainer = GRPOTrainer(
            model=load_model(str(demo.model_path())),
            reward_funcs=case.rewards(),
            args=GRPOConfig(**options),
            train_dataset=Dataset.from_list(case.rows(given.prompts * given.steps, 1000 + seed)),
            eval_dataset=Dataset.from_list(demo.rows("test", 24, 5)),
        )
        trainer.train()
        alerts = read(Path(folder) / "alerts.jsonl")
    said = ", ".join(f"{alert['rule']}@{alert['step']}" for alert in alerts) or "silent"
    print(f"seed {seed}: {said} ({time.perf_counter() - started:.0f} s)", flush=True)
    return alerts


def replay(folder: Path) -> Alerts:
    """What the detectors say of a finished run, step by step."""
    watch = Watch(standard(("eval_reward",)))
    alerts: Alerts = []
    for line in read(folder / "metrics.jsonl"):
        values = {name: Last(value) for name, value in line.items() if isinstance(value, (int, float))}
        seconds = {name.split("/")[1]: metric.value for name, metric in values.items() if name.startswith("seconds/")}
        bad = (Event(kind="non_finite_step", said=""),) if "non_finite" in line else ()
        report = StepReport(step=line["step"], metrics=values, seconds=seconds, events=bad)
        alerts += [{"rule": a.rule, "severity": a.severity, "step": a.step, "said": a.said} for a in watch(report)]
    return alerts


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(cases: Sequence[tuple[str, list[Alerts]]], steps: int) -> str:
    """Markdown: of each kind of run, how many had a false alarm, and which rules spoke."""
    rows = ["| runs | with a false alarm | false alarms, by rule | told for information |", "|---|--:|---|---|"]
    for name, seeds in cases:
        loud = [[alert for alert in alerts if alert["severity"] != "info"] for alerts in seeds]
        quiet = [[alert for alert in alerts if alert["severity"] == "info"] for alerts in seeds]
        rows.append(
            f"| {name}: {len(seeds)} of {steps} steps | {sum(map(bool, loud))} | {counted(loud)} | {counted(quiet)} |"
        )
    return "\n".join(rows)


def fault_table(cases: Sequence[tuple[str, list[Alerts]]]) -> str:
    """Markdown: of each fault, in how many runs it was seen, by which rule, and from which step on."""
    rows = ["| fault | seen in | first seen at step | alerts, by rule |", "|---|--:|---|---|"]
    for name, seeds in cases:
        expected = FAULTS[name].expects
        first = [min((a["step"] for a in alerts if a["rule"] in expected), default=None) for alerts in seeds]
        hit = [step for step in first if step is not None]
        rows.append(f"| {name} | {len(hit)} of {len(seeds)} | {', '.join(map(str, hit)) or '-'} | {counted(seeds)} |")
    return "\n".join(rows)


def counted(seeds: Sequence[Alerts]) -> str:
    """`truncation 3, spike 1`: in how many runs each rule spoke."""
    found = Counter(rule for alerts in seeds for rule in {alert["rule"] for alert in alerts})
    return ", ".join(f"`{rule}` {count}" for rule, count in sorted(found.items())) or "none"


if __name__ == "__main__":
    main()
