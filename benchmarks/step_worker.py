"""One side of the step benchmark: a GRPO script that runs under TRL or Covey, told apart by the import alone.

`benchmarks/step.py` starts it, each side with its own interpreter, and reads the JSON of its last line. Wall and processor
seconds are taken at callbacks that both libraries call; the parts of a TRL step by a clock around its own methods.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

TASK: dict[str, Any] = json.loads(Path(os.environ["STEP_TASK"]).read_text())
"""`model`, `rows` (prompt, answer), `held_out` (prompt, answer), `pattern` and `match` of the reward, `options`."""
PATTERN = re.compile(TASK["pattern"])


def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the pattern finds the answer (or its last `match` characters), else 0."""
    scores = []
    for text, expected in zip(completions, answer, strict=True):
        found = PATTERN.search(text)
        said = found.group(1) if found else ""
        scores.append(float(bool(said) and said[-TASK["match"] :] == expected[-TASK["match"] :]))
    return scores


def dense_reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Something that differs between any two completions, so that every group carries signal."""
    return [sum(map(ord, text)) % 997 / 997 + text.count("a") for text in completions]


class Turns:
    """A file that says which library computes its next step; the other waits, so that a machine whose speed changes is fair to both."""

    ALONE = "alone"

    def __init__(self, mine: str) -> None:
        self.file, self.mine = Path(TASK["turn"]), mine
        self.other = next(side for side in TASK["sides"] if side != mine)

    def wait(self) -> None:
        while self.file.read_text() == self.other:
            time.sleep(0.002)

    def hand_over(self) -> None:
        if self.file.read_text() != self.ALONE:
            self._say(self.other)

    def leave(self) -> None:
        self._say(self.ALONE)

    def _say(self, who: str) -> None:
        new = self.file.with_suffix(f".{self.mine}")
        new.write_text(who)
        new.replace(self.file)


class Clock(TrainerCallback):
    """Seconds of each step, and the highest resident memory since training began."""

    def __init__(self, evaluate: Callable[[], float] | None, every: int, turns: Turns) -> None:
        self.evaluate, self.every, self.turns = evaluate, every, turns
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.curve: list[tuple[float, float, float, int]] = []
        self.base = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.base = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self._look(0)
        self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.wall.append(time.perf_counter() - self.started)
        self.processor.append(time.process_time() - self.started_processor)
        if self.evaluate is not None and state.global_step % self.every == 0:
            self._look(state.global_step)
            if self.curve[-1][2] >= TASK["target"]:
                control.should_training_stop = True
        self.turns.hand_over()
        self._start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.leave()

    def _start(self) -> None:
        self.turns.wait()
        self.started, self.started_processor = time.perf_counter(), time.process_time()

    def _look(self, step: int) -> None:
        if self.evaluate is not None:
            self.curve.append((sum(self.wall), sum(self.processor), self.evaluate(), step))


def resident(name: str) -> float:
    """MiB from /proc/self/status."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def accuracy_of(model: Any, tokenizer: Any) -> float:
    """Greedy held-out accuracy by `model.generate`, for both sides the same."""
    held_out = TASK["held_out"]
    batch = tokenizer([row["prompt"] for row in held_out], return_tensors="pt", padding=True, padding_side="left")
    was_training = model.training
    model.eval()
    with torch.no_grad():
        out = model.generate(**batch, do_sample=False, max_new_tokens=TASK["options"]["max_completion_length"])
    model.train(was_training)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.mean(reward(texts, [row["answer"] for row in held_out]))


def timed_methods(trainer: Any, names: dict[str, str]) -> dict[str, list[float]]:
    """Seconds inside some of the trainer's methods, by part."""
    seconds: dict[str, list[float]] = {part: [] for part in names.values()}
    for name, part in names.items():
        method = getattr(trainer, name)

        def timed(*args: Any, _method: Any = method, _part: str = part, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return _method(*args, **kwargs)
            finally:
                seconds[_part].append(time.perf_counter() - started)

        setattr(trainer, name, timed)
    return seconds


def adapter(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("trl", "before", "covey"), required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16-autocast", "bf16-weights"), default="fp32")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    if given.library == "trl":
        from trl import GRPOConfig, GRPOTrainer
    else:
        from covey import GRPOConfig, GRPOTrainer
    dtype = torch.bfloat16 if given.precision == "bf16-weights" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(TASK["model"], dtype=dtype)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TASK["model"])
    is_race = bool(TASK.get("held_out"))
    clock = Clock(
        (lambda: accuracy_of(model, tokenizer)) if is_race else None, TASK.get("every", 0), Turns(given.library)
    )
    args = GRPOConfig(
        output_dir=given.out,
        bf16=given.precision == "bf16-autocast",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        **TASK["options"],
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=dense_reward if given.dense else reward,
        args=args,
        train_dataset=Dataset.from_list(TASK["rows"]),
        callbacks=[clock],
        peft_config=adapter(TASK["lora"]) if TASK.get("lora") else None,
    )
    parts: dict[str, list[float]] = {}
    if given.library == "trl":
        parts = timed_methods(trainer, {"_generate": "rollout", "_calculate_rewards": "reward"})
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    if given.library != "trl":
        lines = [json.loads(line) for line in (Path(given.out) / "metrics.jsonl").read_text().splitlines()]
        parts = {part: [line.get(f"seconds/{part}", 0.0) for line in lines] for part in ("rollout", "reward")}
    optimizer_mib = (
        sum(
            value.numel() * value.element_size()
            for state in trainer.optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        )
        / 2**20
    )
    result = {
        "library": given.library,
        "precision": given.precision,
        "wall": clock.wall,
        "processor": clock.processor,
        "parts": parts,
        "peak_above_mib": resident("VmHWM") - clock.base - optimizer_mib,
        "base_mib": clock.base,
        "optimizer_mib": optimizer_mib,
        "tokens": [entry.get("completions/mean_length", 0.0) for entry in logs],
        "reward": [entry["reward"] for entry in logs],
        "dead": [entry.get("frac_reward_zero_std", 0.0) for entry in logs],
        "curve": clock.curve,
    }  # fmt: skip
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
