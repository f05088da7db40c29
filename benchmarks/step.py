"""Whole GRPO steps against TRL: the same script with the import changed, the same model, data, reward and seed.

    python benchmarks/step.py --size 10m --shots 0 --peer .venv-trl/bin/python
    python benchmarks/step.py --dense --before ../older/.venv/bin/python  # two versions of Covey
    python benchmarks/step.py --race                                  # the demo's task, to the same held-out accuracy

A step is 4 prompts x 8 completions of up to 200 new tokens on a model trained briefly on GSM8K text (`rollout.py` makes it), with a
sparse 0/1 reward. The sides take turns step by step, a process each, so that both see a machine whose speed changes alike; TRL runs
in each precision and its best counts. Ratios are of medians over the steps after the first two. `make bench` makes the peer's environment. `--cpu-time` compares processor time instead
of wall time, for a machine that others use too (then set one thread). Everything is written to `--out` as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import rollout
from covey import demo
from covey.config.checks import processor_has_bfloat16

WORKER = Path(__file__).with_name("step_worker.py")
PRECISIONS = ["fp32", "bf16-autocast"] if processor_has_bfloat16() else ["fp32"]
"""What this processor multiplies, the faster one last."""
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=".venv-trl/bin/python", help="python of the environment that has TRL")
    parser.add_argument("--before", help="python of an environment with an older Covey, to compare with that instead")
    parser.add_argument("--size", nargs="*", choices=rollout.SHAPES, default=["10m"])
    parser.add_argument("--shots", nargs="*", type=int, default=[0], help="worked examples in front of the question")
    parser.add_argument("--beta", nargs="*", type=float, default=[0.0])
    parser.add_argument("--lora", type=int, help="train an adapter of this rank instead of all weights")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=1, help="processes of each side")
    parser.add_argument(
        "--precision",
        nargs="*",
        choices=("fp32", "bf16-autocast", "bf16-weights", "faster"),
        default=PRECISIONS,
        help="precisions of each side; faster: bf16-autocast where the processor multiplies bfloat16, else fp32",
    )
    parser.add_argument("--dense", action="store_true", help="a reward under which no group is without signal")
    parser.add_argument("--race", action="store_true", help="time to the same accuracy on the demo's task instead")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy that ends the race")
    parser.add_argument("--cpu-time", action="store_true", help="compare processor time")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    given.precision = [PRECISIONS[-1] if name == "faster" else name for name in given.precision]
    given.sides = ("before", "covey") if given.before else ("trl", "covey")
    if not given.before and not Path(given.peer).exists():
        raise SystemExit(f"{given.peer} is not there; `make .venv-trl/.installed` makes it, or give --peer.")
    given.out.mkdir(parents=True, exist_ok=True)
    found = race(given) if given.race else steps(given)
    name = "race" if given.race else "step"
    (given.out / f"{name}.json").write_text(json.dumps(found, indent=1))


def steps(given: argparse.Namespace) -> list[Found]:
    """A table for each model size, number of shots and beta."""
    found = []
    for size in given.size:
        model, tokenizer = rollout.trained(size, 120 if size == "10m" else 60)
        del model
        for shots in given.shots:
            for beta in given.beta:
                task = {**workload(size, tokenizer, shots, beta, given.steps), "lora": given.lora}
                runs = alternate(given, task)
                title = f"{size}, {shots}-shot, beta {beta:g}{', dense reward' if given.dense else ''}{', LoRA' if given.lora else ''}"
                print(f"\n## {title}\n", flush=True)
                print(table(runs, given.cpu_time), flush=True)
                found.append({"title": title, "runs": runs})
    return found


def workload(size: str, tokenizer: Any, shots: int, beta: float, count: int) -> Found:
    """The task of the issue of speed: GSM8K questions; 1 where the last digit after `####` is right, about one in ten."""
    answers = [row["answer"].rsplit("####", 1)[1].strip() for row in rollout.rows("test")]
    prompts = rollout.questions(64, shots)
    rows = [{"prompt": text, "answer": answer} for text, answer in zip(prompts, answers, strict=False)]
    lengths = [len(tokenizer(text)["input_ids"]) for text in prompts]
    print(f"{size}, {shots}-shot: prompts of {statistics.median(lengths):.0f} tokens (median)", flush=True)
    options = {
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "max_completion_length": 200,
        "max_steps": count,
        "learning_rate": 1e-6,
        "beta": beta,
        "seed": 0,
        "gradient_checkpointing": False,
    }
    folder = rollout.CACHE / f"qwen2-{size}-{120 if size == '10m' else 60}"
    return {"model": str(folder), "rows": rows, "pattern": r"####\s*(-?[\d,.]+)", "match": 1, "options": options}


def alternate(given: argparse.Namespace, task: Found) -> list[Found]:
    """Both sides in every precision, step by step in turns. A precision that a side cannot run is reported and left out."""
    found = []
    for _ in range(given.repeats):
        for precision in given.precision:
            found += together(given, task, precision)
    return found


def together(given: argparse.Namespace, task: Found, precision: str) -> list[Found]:
    """One process of each side, of which one computes while the other waits."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        turn, file = Path(folder) / "turn", Path(folder) / "task.json"
        turn.write_text(given.sides[0])
        file.write_text(json.dumps({**task, "turn": str(turn), "sides": given.sides}))
        started = {library: start(given, library, precision, Path(folder)) for library in given.sides}
        for library, (process, said) in started.items():
            while process.poll() is None:
                time.sleep(0.1)
                if any(other.poll() for other, _ in started.values()):  # one that failed has nobody to wait for
                    turn.write_text("alone")
            lines = {name: file.read_text().strip().splitlines() for name, file in said.items()}
            if process.returncode:
                print(f"{library} in {precision} failed: {lines['errors'][-1]}", flush=True)
            else:
                found.append(dict(json.loads(lines["out"][-1])))
    return found


def start(
    given: argparse.Namespace, library: str, precision: str, folder: Path
) -> tuple[subprocess.Popen[bytes], dict[str, Path]]:
    """A side's process, and the files that it writes to."""
    python = {"trl": given.peer, "before": given.before, "covey": sys.executable}[library]
    command = [python, str(WORKER), "--library", library, "--precision", precision, "--out", f"{folder}/{library}"]
    command += ["--dense"] if given.dense else []
    environment = {**os.environ, "STEP_TASK": f"{folder}/task.json", "TRL_EXPERIMENTAL_SILENCE": "1"}
    said = {name: folder / f"{library}.{name}" for name in ("out", "errors")}
    with said["out"].open("wb") as out, said["errors"].open("wb") as errors:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=errors), said


def table(runs: list[Found], cpu_time: bool) -> str:
    """One row for each side and precision, with ratios of the faster peer to each."""
    clock = "processor" if cpu_time else "wall"
    rows: dict[tuple[str, str], Found] = {}
    for library, precision in dict.fromkeys((one["library"], one["precision"]) for one in runs):
        same = [one for one in runs if (one["library"], one["precision"]) == (library, precision)]
        step = middle([one[clock] for one in same])
        part = {name: middle([one["parts"][name] for one in same]) for name in ("rollout", "reward")}
        rows[library, precision] = {
            "step": step,
            **part,
            "learn": middle([one["wall"] for one in same]) - part["rollout"] - part["reward"],
            "peak": statistics.median(one["peak_above_mib"] for one in same),
            "tokens": statistics.mean(length for one in same for length in one["tokens"]) * 32 / step,
            "dead": statistics.mean(dead for one in same for dead in one["dead"]),
        }
    peers = {key: row for key, row in rows.items() if key[0] != "covey"}
    best = min((row["step"] for row in peers.values()), default=float("nan"))
    leanest = min((row["peak"] for row in peers.values()), default=float("nan"))
    lines = [
        "| side | s/step | rollout | reward | learn | tokens/s | dead groups | peak above weights, MiB | speed | memory |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (library, precision), row in rows.items():
        lines.append(
            f"| {library} {precision} | {row['step']:.2f} | {row['rollout']:.2f} | {row['reward']:.2f} | {row['learn']:.2f} | "
            f"{row['tokens']:.0f} | {row['dead']:.0%} | {row['peak']:.0f} | {best / row['step']:.1f}x | {row['peak'] / leanest:.2f} |"
        )
    return "\n".join(lines)


def middle(series: list[list[float]]) -> float:
    """Median over the steps of all runs, the first two of each apart where there are more: they warm up."""
    return statistics.median(value for values in series for value in values[2:] or values)


def race(given: argparse.Namespace) -> list[Found]:
    """Both sides from the shipped model with the demo's settings, until greedy held-out accuracy reaches the target."""
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())

    def plain(split: Any, count: int) -> list[Found]:
        as_text = lambda row: tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        return [{"prompt": as_text(row), "answer": row["answer"]} for row in demo.rows(split, count)]

    mine = ("rollout_log_steps", "save_steps", "save_total_limit", "logging_steps", "gradient_checkpointing")
    options = {name: value for name, value in demo.DEMO_SETTINGS.items() if name not in mine}
    task = {
        "model": str(demo.model_path()),
        "rows": plain("train", 4096),
        "held_out": plain("test", 150),
        "pattern": r"####\s*(-?\d+)\s*$",
        "match": 99,
        "options": {**options, "gradient_checkpointing": False, "seed": 0},
        "target": given.target,
        "every": 5,
    }
    runs = alternate(given, task)
    clock = 1 if given.cpu_time else 0
    print("\n| side | steps | seconds of training | accuracy |\n|---|--:|--:|--:|")
    for one in runs:
        last = one["curve"][-1]
        print(f"| {one['library']} {one['precision']} | {last[3]} | {last[clock]:.1f} | {last[2]:.0%} |", flush=True)
    (given.out / "race.svg").write_text(picture(runs, clock))
    return runs


def picture(runs: list[Found], clock: int, width: int = 640, height: int = 320) -> str:
    """Accuracy over seconds of training, a line for each side, as SVG."""
    end = max(point[clock] for one in runs for point in one["curve"])
    place = lambda point: f"{60 + point[clock] / end * (width - 80):.1f},{height - 40 - point[2] * (height - 60):.1f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    ]
    for tick in range(0, 101, 25):
        y = height - 40 - tick / 100 * (height - 60)
        parts.append(
            f'<path d="M60 {y}H{width - 20}" stroke="#ddd"/><text x="50" y="{y + 4}" text-anchor="end">{tick}%</text>'
        )
    for i, one in enumerate(runs):
        color, name = ("#c44", "#e99", "#06c", "#6ad")[i % 4], f"{one['library']} {one['precision']}"
        parts.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{" ".join(map(place, one["curve"]))}"/>'
        )
        parts.append(
            f'<text x="{width - 24}" y="{height - 110 + 16 * i}" fill="{color}" text-anchor="end">{name}</text>'
        )
    parts.append(
        f'<text x="60" y="{height - 14}">0</text><text x="{width - 20}" y="{height - 14}" text-anchor="end">{end:.0f} s of training</text></svg>'
    )
    return "\n".join(parts)


if __name__ == "__main__":
    main()
