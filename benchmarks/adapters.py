"""Adapters on one base beside runs of their own: processor time, wall time and peak memory, and whether their bits are equal.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --adapters 4 --steps 3 --hidden 640 --layers 10 --repeats 3
    python benchmarks/adapters.py --rollouts --hidden 512 --layers 8
    python benchmarks/adapters.py --tune --hidden 512 --layers 8

The base has random weights and the demo's tokenizer and task. `together` is one process (`covey train --adapters N`), `alone`
is N processes one after another (`covey train --seed S`), each with one thread. The peak is that of a process's resident memory;
N runs alone at the same time would need N times theirs. `--rollouts` measures the rollouts alone, in one process: the
completions of all runs in one batch (`covey.rollout.JointRollouts`) beside one batch a run. `--tune` measures a search of N
trials, joined (`covey tune --n-jobs N`) beside one after another, both in one process on one base.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from covey.demo import model_path
from covey.rollout import Drawing, Drawn, JointRollouts, NativeSampler, SamplingParams

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


def measured(words: list[str], log: Path, verb: str = "train") -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak MiB of one `covey train`, or another verb."""
    started = time.perf_counter()
    with log.open("ab") as file:
        command = [sys.executable, "-m", "covey", verb, *words]
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(log.read_text()[-2000:])
    found = time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / MIB
    print("measured: {:.0f} s, {:.0f} processor s, {:.0f} MiB".format(*found), file=sys.stderr, flush=True)
    return found


def rollouts(place: Path, given: argparse.Namespace) -> None:
    """Print processor seconds of the runs' rollouts, one after another and in one batch, and the median of their ratios."""
    torch.set_num_threads(1)
    base, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    prompts = [f"{i} + {i * 7} = ?" for i in range(given.completions // 8)]
    asked = []
    for seed in range(given.adapters):
        model = copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})
        torch.manual_seed(seed)
        lora = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        sampler = NativeSampler(get_peft_model(model, lora), tokenizer, eos_ids=(), dtype="float32")
        asked.append(Drawing(sampler, prompts, 8, SamplingParams(max_tokens=given.tokens, seed=seed)))
    joint, found = JointRollouts(), []
    for _ in range(given.repeats + 1):  # the first compares bits, compiles and warms up
        started = time.process_time()
        alone = [list(one.sampler.sample(one.prompts, one.n, one.params)) for one in asked]
        between = time.process_time()
        drawn = [one for one in joint(asked) if isinstance(one, Drawn)]
        found.append((between - started, time.process_time() - between))
        ids = [[one.token_ids.tolist() for group in groups for one in group.completions] for groups in alone]
        assert ids == [[one.token_ids.tolist() for group in one.groups for one in group.completions] for one in drawn]
    (first, *_), alone_s, joint_s = found, *map(median, zip(*found[1:], strict=True))
    ratios = [b / a for a, b in found[1:]]
    print(
        f"{given.adapters} rollouts of {given.completions} completions of {given.tokens} tokens: {alone_s:.2f} processor s"
    )
    print(
        f"in one batch: {joint_s:.2f}, the first {first[1]:.2f}; ratios {min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"adapters": 4, "steps": 3, "hidden": 640, "layers": 10, "completions": 16, "tokens": 48, "repeats": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rollouts", action="store_true")
    parser.add_argument("--tune", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        size = make_base(place / "base", given.hidden, given.layers)
        print(
            f"base of {size:.0f} MiB, {given.adapters} adapters of rank 8, {given.steps} steps of {given.completions}"
        )
        (place / "reward.py").write_text(REWARD)
        if given.rollouts:
            rollouts(place / "base", given)
            return
        ratios = []
        for repeat in range(given.repeats):
            compare = searched if given.tune else compared
            ratios.append(compare(place / str(repeat), place / "base", given))
    print(
        f"processor time, together over {'one after another' if given.tune else 'alone'}: {', '.join(f'{one:.2f}' for one in ratios)}, median {median(ratios):.2f}"
    )


def options(base: Path, given: argparse.Namespace) -> list[str]:
    """Words of `covey train` that all runs share."""
    return [
        "demo", "--model", str(base), "--lora-r", "8", "--max-steps", str(given.steps), "--use-cpu",
        "--per-device-train-batch-size", str(given.completions), "--num-generations", "8", "--disable-tqdm",
        "--max-completion-length", str(given.tokens), "--reward", f"{base.with_name('reward.py')}:digits",
    ]  # fmt: skip


def searched(place: Path, base: Path, given: argparse.Namespace) -> float:
    """Search with the trials joined and one after another, and print a table. Returns the ratio of processor times.

    The first trials are drawn at random, so both searches try the same values. Each trial is evaluated once, at its end.
    """
    place.mkdir()
    words = [
        *options(base, given), "--search", "learning_rate=1e-5:1e-3:log", "--trials", str(given.adapters), "--keep-all",
        "--eval-dataset", "demo:test", "--max-eval-prompts", "16", "--num-generations-eval", "1", "--eval-steps", str(given.steps), "--pruner", "none",
    ]  # fmt: skip
    print(f"{'':<18}{'wall s':>10}{'processor s':>14}{'peak MiB':>12}")
    found = {}
    for name, jobs in (("joined", given.adapters), ("one after another", 1)):
        more = ["--n-jobs", str(jobs), "--output-dir", str(place / name)]
        found[name] = measured([*words, *more], place / "log", "tune")
        print("{:<18}{:>10.0f}{:>14.0f}{:>12.0f}".format(name, *found[name]))
    ends = [f"trial-{number:03d}/model/adapter_model.safetensors" for number in range(given.adapters)]
    same = [(place / "joined" / end).read_bytes() == (place / "one after another" / end).read_bytes() for end in ends]
    print(f"adapters equal, bit by bit: {sum(same)} of {len(same)}", flush=True)
    return found["joined"][1] / found["one after another"][1]


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
