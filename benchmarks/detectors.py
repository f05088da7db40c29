"""Alerts judged on real runs of 500 steps: false alarms in healthy runs, and planted faults found, by rule.

    python benchmarks/detectors.py run                 # all runs, into tests/data/runs (45 minutes of one core)
    python benchmarks/detectors.py run healthy-03 faulty-10
    python benchmarks/detectors.py table               # the tables of docs/alerts.md, from the kept metrics

A run is trained by `GRPOTrainer` on a small task. Kept of it are the metrics that detectors read, to four digits, without times.
Thresholds were fixed on the runs below the numbers of `FIXED`; the table judges on the others, which were made afterwards.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import math
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.monitor.detectors import standard
from covey.monitor.watch import Watch
from covey.types import Event, Last, StepReport

KEPT = Path(__file__).parents[1] / "tests" / "data" / "runs"
PAGE = Path(__file__).parents[1] / "docs" / "alerts.md"
MARKS = ("<!-- kept runs -->", "<!-- end of kept runs -->")
STEPS, PROMPTS = 500, 4
FIXED = {"healthy": 40, "faulty": 44}
"""Runs of each kind that fix thresholds; later numbers judge."""
LOOKED_AT = ("faulty-61",)
"""Runs that were made to judge, and then changed a rule: they count as runs that fix thresholds."""
Found = list[tuple[int, str, str]]
"""Step, rule and severity of each alert."""


def train(name: str, steps: int = STEPS) -> dict[str, Any]:
    """The record of a run: its facts, its metrics by name [steps], its evaluations, and the alerts that it raised."""
    import torch
    from datasets import Dataset
    from detector_cases import FAULTS, RUNS, Fault, task_of
    from detector_tasks import model_for

    from covey import GRPOConfig, GRPOTrainer

    run = RUNS[name]
    task, fault = task_of(run), FAULTS[run.fault] if run.fault else Fault(expects=(), on=(("", ""), ("", "")))
    given = {"learning_rate": 1e-3, **task.options, **run.settings, **fault.settings}
    given["learning_rate"] *= fault.rate
    generations = given.setdefault("num_generations", 4)
    rewards = fault.rewards(task.rewards)
    weights = fault.weights(len(task.rewards)) if fault.weights else [1.0] * len(rewards)
    rng = random.Random(run.seed)
    rows = task.rows(PROMPTS * steps, 1000 + run.seed + 100 * bool(run.fault))
    if fault.row is not None:
        rows = [fault.row(row, rng, i // PROMPTS) for i, row in enumerate(rows)]
    torch.manual_seed(run.seed)
    model, tokenizer = model_for(run.family, run.task, fault.dropout)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": PROMPTS * generations, "seed": run.seed,
            "max_completion_length": task.too_short if fault.is_too_short else task.room, "reward_weights": weights,
            "lr_scheduler_type": "linear", "warmup_steps": 5, "shuffle_dataset": False, "gradient_checkpointing": False,
            "eval_strategy": "steps", "eval_steps": 100, "eval_on_start": True, "num_generations_eval": 1,
            "per_device_eval_batch_size": 16, "save_strategy": "no", "rollout_log_steps": 0, "report_to": "none",
            "disable_tqdm": True, "log_level": "error", "logging_steps": 10**6, **given,
        }  # fmt: skip
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, reward_funcs=list(rewards), args=GRPOConfig(**options),
            train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(task.rows(16, 5)),
        )  # fmt: skip
        if fault.spoil is not None:
            fault.spoil(trainer)
        trainer.train()
        names = [one.split("(")[0] if isinstance(one, str) else one.__name__ for one in rewards]
        facts = {
            "name": name, "fault": run.fault, "family": run.family, "task": run.task, "expects": fault.expects,
            "onset": fault.onset, "settings": given,
        }  # fmt: skip
        return {**facts, **recorded(Path(folder), names, weights)}


def recorded(folder: Path, names: Sequence[str], weights: Sequence[float]) -> dict[str, Any]:
    """Of a run folder: audit metrics, weights, metrics by name (without times), evaluations and alerts."""
    lines, events = read(folder / "metrics.jsonl"), read(folder / "events.jsonl")
    bad = {event["step"] for event in events if event["kind"] == "non_finite_step"}
    audits = [f"rewards/{name}/mean" for name, weight in zip(names, weights, strict=True) if weight == 0]
    audits.append("eval_reward")
    kept = sorted({name for line in lines for name in line if name not in ("step", "time") and "second" not in name})
    evaluations = [
        [line["step"], {name: value for name, value in line.items() if is_number(value)}]
        for line in read(folder / "evaluations.jsonl")
    ]
    return {
        "audits": audits,
        "weights": {name: weight for name, weight in zip(names, weights, strict=True) if weight > 0},
        "steps": [line["step"] for line in lines],
        "non_finite_steps": sorted(bad),
        "metrics": {name: [line.get(name) for line in lines] for name in kept},
        "evaluations": evaluations,
        "alerts": [(one["step"], one["rule"], one["severity"]) for one in read(folder / "alerts.jsonl")],
    }


def replay(record: Mapping[str, Any]) -> Found:
    """Alerts of the detectors of today, shown the metrics of a kept run step by step."""
    audits = tuple(record["audits"])
    watch = Watch(standard(audits, record["weights"]))
    evaluations: dict[int, list[dict[str, float]]] = {}
    for step, metrics in record["evaluations"]:
        evaluations.setdefault(step, []).append(metrics)
    bad = set(record["non_finite_steps"])
    found: Found = []
    for metrics in evaluations.get(0, ()):
        watch.evaluated(metrics)
    columns = list(record["metrics"].items())
    for i, step in enumerate(record["steps"]):
        values = {name: Last(column[i]) for name, column in columns if column[i] is not None}
        events = (Event(kind="non_finite_step", said=""),) if step in bad else ()
        found += [
            (one.step, one.rule, one.severity) for one in watch(StepReport(step=step, metrics=values, events=events))
        ]
        for metrics in evaluations.get(step, ()):
            watch.evaluated(metrics)
    return found


def rounded(value: Any, digits: int) -> Any:
    """Numbers to so many digits that count."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: rounded(one, digits) for name, one in value.items()}
    return [rounded(one, digits) for one in value] if isinstance(value, (list, tuple)) else value


def keep(record: Mapping[str, Any], folder: Path = KEPT) -> Path:
    """Write a record as gzipped JSON, to four digits; to six where four do not give the alerts that the run itself raised.

    Raises ValueError where six do not either.
    """
    told = [tuple(alert) for alert in record["alerts"] if alert[1] != "throughput_drop"]  # times are not kept
    record = {name: value for name, value in record.items() if name != "alerts"}
    kept = rounded(record, 4)
    if replay(kept) != told:
        kept = rounded(record, 6)
    if (again := replay(kept)) != told:
        raise ValueError(f"{record['name']}: the run raised {told}, its kept metrics raise {again}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['name']}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), 9, mtime=0))
    return path


def kept(folder: Path = KEPT) -> list[dict[str, Any]]:
    return [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.glob("*.json.gz"))]


def table(judged: Sequence[tuple[Mapping[str, Any], Found]]) -> str:
    """Markdown, of records and their alerts: false alarms of healthy runs, and of each fault in how many runs its rules spoke."""
    rows = [
        "| healthy runs that | number | with a false alarm | false alarms, by rule | `info` alerts |",
        "|---|--:|--:|---|---|",
    ]
    for half, does in HALVES.items():
        healthy = [found for one, found in judged if one["fault"] is None and half_of(one) == half]
        loud = [rules(found) - rules(found, is_info=True) for found in healthy]
        quiet = [rules(found, is_info=True) for found in healthy]
        rows.append(f"| {does} | {len(healthy)} | {sum(map(bool, loud))} | {counted(loud)} | {counted(quiet)} |")
    rows += [
        "",
        "| fault | named: fix | judge | by rule | steps until named | other alerts |",
        "|---|--:|--:|---|---|---|",
    ]
    faulty = [(one, found) for one, found in judged if one["fault"] is not None]
    for fault in dict.fromkeys(one["fault"] for one, _ in faulty):
        rows.append(_fault_row(fault, [pair for pair in faulty if pair[0]["fault"] == fault]))
    return "\n".join([*rows, "", *_sums(faulty)])


def _fault_row(fault: str, runs: Sequence[tuple[Mapping[str, Any], Found]]) -> str:
    cells = []
    for half in HALVES:
        steps = [named(one, found) for one, found in runs if half_of(one) == half]
        cells.append(f"{sum(step is not None for step in steps)} of {len(steps)}")
    delays = [step - one["onset"] for one, found in runs if (step := named(one, found)) is not None]
    told = [rules(after(one, found)) for one, found in runs]
    wanted = runs[0][0]["expects"]
    by_rule = ", ".join(f"`{rule}` {sum(rule in one for one in told)}" for rule in wanted)
    other = counted([one - set(wanted) for one in told])
    return f"| {fault} | {' | '.join(cells)} | {by_rule} | {', '.join(map(str, delays)) or '-'} | {other} |"


def _sums(faulty: Sequence[tuple[Mapping[str, Any], Found]]) -> list[str]:
    """A line a half: faults named, faults that raised any warning, and false alarms before a fault began."""
    rows = []
    for half, does in HALVES.items():
        runs = [pair for pair in faulty if half_of(pair[0]) == half]
        hit = sum(named(*pair) is not None for pair in runs)
        any_rule = sum(any(is_loud(alert) for alert in after(*pair)) for pair in runs)
        late = [(one, found) for one, found in runs if one["onset"]]
        early = sum(any(is_loud(alert) and alert[0] <= one["onset"] for alert in found) for one, found in late)
        rows.append(
            f"* Faulty runs that {does}: {hit} of {len(runs)} named by a rule of the fault, {any_rule} of {len(runs)} with a warning "
            f"or an error of any rule. A false alarm before the fault began: {early} of {len(late)}."
        )
    return rows


HALVES = {"fix": "fix thresholds", "judge": "judge"}


def half_of(record: Mapping[str, Any]) -> str:
    kind, number = record["name"].split("-")
    return "judge" if int(number) >= FIXED[kind] and record["name"] not in LOOKED_AT else "fix"


def after(record: Mapping[str, Any], found: Found) -> Found:
    """The alerts from the beginning of the fault on."""
    return [alert for alert in found if alert[0] > record["onset"]]


def named(record: Mapping[str, Any], found: Found) -> int | None:
    """First step after the fault began at which one of its rules spoke."""
    return min((step for step, rule, _ in after(record, found) if rule in record["expects"]), default=None)


def rules(found: Found, *, is_info: bool = False) -> set[str]:
    """Rules that spoke; with `is_info` those that spoke for information alone."""
    loud, every = {rule for _, rule, level in found if level != "info"}, {rule for _, rule, _ in found}
    return every - loud if is_info else every


def is_loud(alert: tuple[int, str, str]) -> bool:
    return alert[2] != "info"


def counted(runs: Iterable[set[str]]) -> str:
    """`truncation` 3: in how many runs each rule spoke."""
    times = Counter(rule for rules in runs for rule in rules)
    return ", ".join(f"`{rule}` {count}" for rule, count in sorted(times.items())) or "none"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument(
        "names", nargs="*", help="runs such as healthy-03 or faulty-10; all that are not kept yet by default"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    parser.add_argument("--out", type=Path, default=KEPT, help="folder of the kept metrics")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/alerts.md")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    if given.what == "table":
        found = table([(record, replay(record)) for record in kept(given.out)])
        if given.write:
            before, _, behind = PAGE.read_text().partition(MARKS[0])
            PAGE.write_text(f"{before}{MARKS[0]}\n{found}\n{MARKS[1]}{behind.partition(MARKS[1])[2]}")
        print(found)
        return
    from detector_cases import RUNS

    logging.disable(logging.WARNING)
    for name in given.names or [name for name in RUNS if not (given.out / f"{name}.json.gz").exists()]:
        started = time.process_time()
        record = train(name, given.steps)
        path = keep(record, given.out)
        reward = [one for one in record["metrics"]["reward"] if one is not None]
        ends = sum(reward[:20]) / 20, sum(reward[-20:]) / 20
        print(
            f"{name}: reward {ends[0]:.3g} to {ends[1]:.3g}, {path.stat().st_size / 1e3:.0f} kB, "
            f"{time.process_time() - started:.0f} s of a core",
            flush=True,
        )


if __name__ == "__main__":
    main()
