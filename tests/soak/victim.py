"""The run that faults are done to: a one-layer model, real prompts, rewards and saves, in a process of its own."""

from __future__ import annotations

import hashlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from covey.config import GRPOConfig
from covey.demo import model_path, rows
from covey.errors import CoveyError
from covey.training.trainer import GRPOTrainer

END = "weights.sha256"
"""File of a run that reached its last step: the hash of its weights, and whether all are finite."""


@dataclass(frozen=True)
class Plan:
    """Settings of one process."""

    folder: str
    steps: int = 12
    save_steps: int = 2
    trouble: str = ""
    """Fault inside the process: a name of TROUBLES, or empty."""
    at: int = 0
    """Step before which the fault occurs, counted from 0."""
    rank: int = 0
    size: int = 1
    port: int = 0


def work(plan: Plan) -> None:
    """Train, leave the hash of the weights, and exit as `covey train` would."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that starts a background job sets SIGINT to ignored
    sys.exit(run(plan))


def run(plan: Plan) -> int:
    """Go on where the folder's run stopped, to the last step. Returns the exit code."""
    folder = Path(plan.folder)
    with open(f"{plan.folder}-rank{plan.rank}.log", "a", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    if plan.size > 1:
        os.environ |= {"RANK": str(plan.rank), "LOCAL_RANK": str(plan.rank), "WORLD_SIZE": str(plan.size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(plan.port)}
    one = trainer(plan)
    one.raises_when_stopped = False
    try:
        one.train(resume_from_checkpoint="auto")
    except CoveyError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if one.exit_code == 0 and plan.rank == 0:
        flat = torch.cat([p.detach().flatten() for p in one.model.parameters()])
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest() if bool(flat.isfinite().all()) else "not finite"
        (folder / END).write_text(digest)
    return one.exit_code


def trainer(plan: Plan) -> GRPOTrainer:
    """A trainer with the plan's trouble in it."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    torch.manual_seed(0)
    is_large = plan.trouble == "no memory"
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128 if is_large else 32,
            intermediate_size=256 if is_large else 64,
            num_hidden_layers=4 if is_large else 1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
        )
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    length, each = (200, 16) if is_large else (12, 8 // plan.size)
    one = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=REWARDS.get(plan.trouble, even),
        train_dataset=Dataset.from_list(rows("train", 40)),
        args=GRPOConfig(
            output_dir=plan.folder,
            max_steps=plan.steps,
            save_strategy="steps",
            save_steps=plan.save_steps,
            save_total_limit=3,
            per_device_train_batch_size=each,
            num_generations=4,
            max_completion_length=length,
            learning_rate=1e-2,
            logging_steps=1,
            rollout_log_steps=4,
            reward_timeout_seconds=0.5,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
    )
    if plan.trouble in TROUBLES:
        one.add_callback(Before(plan.at, TROUBLES[plan.trouble](one)))
    return one


class Before(TrainerCallback):
    """Does something before one step, once."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            self.act()


# -- rewards ----------------------------------------------------------------------------------------------------------


def even(completions: list[Any], **columns: Any) -> list[float]:
    """The share of even bytes: a reward that differs from answer to answer and needs no model that can count."""
    return [sum(1 for byte in str(one).encode() if byte % 2 == 0) / 100 for one in completions]


def raising(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
    if trainer_state.global_step % 3 == 1:
        raise LookupError("no such answer")
    return even(completions)


def hanging(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
    if trainer_state.global_step % 4 == 1:
        time.sleep(600)
    return even(completions)


def rubbish(completions: list[Any], trainer_state: Any, **columns: Any) -> Any:
    """Something else than numbers in most steps."""
    odd: list[Any] = ["a word", math.inf, math.nan, None, [1.0], {}]
    step = trainer_state.global_step
    if step % 4 == 1:
        return [odd[(step + i) % len(odd)] for i in range(len(completions))]
    return [None, "no list", [1.0]][step % 3] if step % 4 == 2 else even(completions)


REWARDS: dict[str, Any] = {"reward raises": raising, "reward hangs": hanging, "reward rubbish": rubbish}


# -- from inside ------------------------------------------------------------------------------------------------------


def bad_gradient(one: GRPOTrainer) -> Callable[[], None]:
    """NaN in one gradient of one step."""
    left = [0]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if not left[0]:
            return gradient
        left[0] -= 1
        return gradient * math.nan

    next(p for p in one.model.parameters() if p.requires_grad).register_hook(spoil)
    return lambda: left.__setitem__(0, 1)


def small_files(one: GRPOTrainer) -> Callable[[], None]:
    """Limit files to 20 kB, until three more steps are done."""

    def limit() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        lift = one.state.global_step + 3
        one.add_callback(Before(lift, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))))

    return limit


def no_memory(one: GRPOTrainer) -> Callable[[], None]:
    """Limit the process to 16 MiB more memory than it has."""

    def limit() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + 16 * 2**20
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    return limit


TROUBLES: dict[str, Callable[[GRPOTrainer], Callable[[], None]]] = {
    "bad gradient": bad_gradient,
    "disk full": small_files,
    "no memory": no_memory,
}
