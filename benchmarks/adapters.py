"""Adapters on one base beside runs of their own: processor time, wall time and peak memory, and whether their bits are equal.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --adapters 4 --steps 3 --hidden 640 --layers 10 --repeats 3

The base has random weights and the demo's tokenizer and task. `together` is one process (`covey train --adapters N`), `alone`
is N processes one after another (`covey train --seed S`), each with one thread. The peak is that of a process's resident memory;
N runs alone at the same time would need N times theirs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from covey.demo import model_path

MIB = 1024**2
REWARD = """def digits(completions, **columns):
    return [sum(c in "0123456789" for c in str(text)) / max(1, len(str(text))) for text in completions]
"""
"""Differs between completions of random weights: the learner leaves out groups whose rewards are equal."""


def make_base(place: Path, hidden: int, layers: int) -> float:
    """Write a base model of random weights. Returns its size in MiB."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True,
        )
    )  # fmt: skip
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters()) / MIB


def measured(words: list[str], log: Path) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak MiB of one `covey train`."""
    started = time.perf_counter()
    with log.open("ab") as file:
        command = [sys.executable, "-m", "covey", "train", *words]
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(log.read_text()[-2000:])
    found = time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / MIB
    print("measured: {:.0f} s, {:.0f} processor s, {:.0f} MiB".format(*found), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"adapters": 4, "steps": 3, "hidden": 640, "layers": 10, "completions": 16, "tokens": 48, "repeats": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        size = make_base(place / "base", given.hidden, given.layers)
        print(
            f"base of {size:.0f} MiB, {given.adapters} adapters of rank 8, {given.steps} steps of {given.completions}"
        )
        (place / "reward.py").write_text(REWARD)
        ratios = [compared(place / str(repeat), place / "base", given) for repeat in range(given.repeats)]
    print(
        f"processor time, together over alone: {', '.join(f'{one:.2f}' for one in ratios)}, median {median(ratios):.2f}"
    )


def options(base: Path, given: argparse.Namespace) -> list[str]:
    """Words of `covey train` that all runs share."""
    return [
        "demo", "--model", str(base), "--lora-r", "8", "--max-steps", str(given.steps), "--use-cpu",
        "--per-device-train-batch-size", str(given.completions), "--num-generations", "8", "--disable-tqdm",
        "--max-completion-length", str(given.tokens), "--reward", f"{base.with_name('reward.py')}:digits",
    ]  # fmt: skip


def compared(place: Path, base: Path, given: argparse.Namespace) -> float:
    """Train together and alone, and print a table. Returns the ratio of processor times."""
    place.mkdir()
    words = options(base, given)
    together = measured([*words, "--adapters", str(given.adapters), "--output-dir", str(place / "a")], place / "log")
    seeds = range(given.adapters)
    alone = [
        measured([*words, "--seed", str(seed), "--output-dir", str(place / f"s{seed}")], place / "log")
        for seed in seeds
    ]
    name = "model/adapter_model.safetensors"
    same = [(place / f"a/seed-{i}" / name).read_bytes() == (place / f"s{i}" / name).read_bytes() for i in seeds]
    walls, processors, peaks = zip(*alone, strict=True)
    print(f"{'':<10}{'wall s':>10}{'processor s':>14}{'peak MiB':>12}{'at once MiB':>14}")
    print(f"{'together':<10}{together[0]:>10.0f}{together[1]:>14.0f}{together[2]:>12.0f}{together[2]:>14.0f}")
    print(f"{'alone':<10}{sum(walls):>10.0f}{sum(processors):>14.0f}{max(peaks):>12.0f}{sum(peaks):>14.0f}")
    print(f"adapters equal to those alone, bit by bit: {sum(same)} of {len(same)}", flush=True)
    return together[1] / sum(processors)


if __name__ == "__main__":
    main()
