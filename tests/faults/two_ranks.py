"""Run apart, in each of two processes: a tiny run in which rank 1 meets a fault at its third reward.

`python two_ranks.py TESTS FOLDER FAULT [resume | auto]`; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as a launcher sets them.
"told in a rollout" and "told in an update" ("..., split" with FSDP) send SIGTERM to rank 1 alone, in the middle of the third step,
"told in an evaluation" in the middle of the one after the second step.
Under `torchrun --max-restarts`, "kill first" kills rank 1 in the first attempt, "kill twice" rank 0 in the second too; LATE="0,1" lets
rank 0 come seconds after the other one in the second attempt, and rank 1 in the third.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch

torch.set_num_threads(1)
from datasets import Dataset  # noqa: E402

from covey import GRPOConfig, GRPOTrainer  # noqa: E402
from covey.errors import CoveyError  # noqa: E402
from covey.process import world  # noqa: E402
from kit import tiny_model, tiny_tokenizer  # noqa: E402

FOLDER, FAULT = Path(sys.argv[2]), sys.argv[3]
RANK = int(os.environ["RANK"])
PATIENCE = int(os.environ.get("PATIENCE", "60"))
world.SILENCE_SECONDS = PATIENCE  # an hour of patience is one of silence too
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
calls = []


def hang() -> None:
    time.sleep(600)


def fail() -> None:
    raise LookupError("there is no such answer")


def kill_once() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "kill once": kill_once,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill, split": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "raise": fail,
    "exit": lambda: os._exit(0),
}


KILLS = {"kill first": [(0, 1, 2)], "kill twice": [(0, 1, 2), (1, 0, 4)]}
"""Attempt, rank and step of each."""


def reward_steps(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


class OnStep:
    """Built late: transformers is only imported once."""

    @staticmethod
    def callback():
        from transformers import TrainerCallback

        class Break(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if (ATTEMPT, RANK, state.global_step) in KILLS.get(FAULT, ()):
                    kill_once()
                is_done = FAULT == "kill once" and (FOLDER / "at").exists()
                if RANK == 1 and state.global_step == 2 and FAULT in FAULTS and not is_done:
                    (FOLDER / "at").write_text(str(time.time()))
                    FAULTS[FAULT]()

        return Break()


def spoil(one) -> None:
    """NaN in a gradient of this process alone, in its third step."""
    parameter = next(p for p in one.model.parameters() if p.requires_grad)
    parameter.register_hook(lambda gradient: gradient * (float("nan") if one.state.global_step == 2 else 1.0))


def come_late() -> None:
    """As on a machine that others load: one process of a restart is ready seconds after the other."""
    late = os.environ.get("LATE", "").split(",")
    if 0 < ATTEMPT <= len(late) and late[ATTEMPT - 1] == str(RANK):
        time.sleep(5)


def tell_in_a_rollout(one) -> None:
    """Rank 1 is told at its first token of the third step; rank 0 writes no second token of it before it has heard."""
    from covey.rollout.scheduler import Scheduler

    write, seen = Scheduler._step, []

    def watched(self):
        if one.state.global_step == 2 and not seen:
            seen.append(1)
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 60
            while RANK == 0 and not one.world.hears_stop(False) and time.monotonic() < until:
                time.sleep(0.05)
        return write(self)

    Scheduler._step = watched


def tell_in_an_evaluation(one) -> None:
    """Rank 1 is told at its first token of the evaluation after the second step; the evaluation's rewards are never asked for."""
    from covey.rollout.scheduler import Scheduler

    write, evaluate, seen = Scheduler._step, one.evaluate, []

    def evaluated(*args, **kwargs):
        seen.append(one.state.global_step)
        return evaluate(*args, **kwargs)

    def watched(self):
        if RANK == 1 and seen == [2]:
            seen.append("told")
            os.kill(os.getpid(), signal.SIGTERM)
        return write(self)

    Scheduler._step, one.evaluate = watched, evaluated


def tell_in_an_update(one) -> None:
    """Rank 1 is told in the first of its micro-batches of the third step."""
    from covey.learner.learner import Learner

    measure, seen = Learner._tokens, []

    def watched(self, *args):
        found = measure(self, *args)
        if RANK == 1 and one.state.global_step == 2 and not seen:
            seen.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    Learner._tokens = watched


def main() -> int:
    come_late()
    try:
        train()
    except CoveyError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def train() -> None:
    rows = 7 if FAULT != "fewer rows" or RANK == 0 else 4
    prompts = ["2 + 2 =", "Tom has", "12 + 30", "What is", "Anna had 20 pens", "The answer", "How many"][:rows]
    if FAULT == "other lengths" and RANK == 1:
        prompts = [prompt * 5 for prompt in prompts]
    one = GRPOTrainer(
        model=tiny_model(hidden=16),
        processing_class=tiny_tokenizer(),
        reward_funcs=reward_steps,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:3]}),
        callbacks=[OnStep.callback()],
        args=GRPOConfig(
            output_dir=str(FOLDER / "run"),
            num_train_epochs=3,
            save_strategy="steps",
            save_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=6,
            fsdp=FAULT.endswith(", split") or None,
            **({"gradient_accumulation_steps": 4, "max_tokens_per_microbatch": 30} if FAULT.startswith("told") else {}),
            **({"eval_strategy": "steps", "eval_steps": 2} if "evaluation" in FAULT else {}),
            learning_rate=0.1 if FAULT != "other options" or RANK == 0 else 0.2,
            logging_steps=1,
            use_cpu=FAULT != "no word of a CPU",
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            ddp_timeout=PATIENCE,
            **({"max_steps": 6 if FAULT.endswith("twice") else 5} if FAULT != "fewer rows" else {}),
        ),
    )
    if FAULT == "nan" and RANK == 1:
        spoil(one)
    if FAULT.startswith("told in a rollout"):
        tell_in_a_rollout(one)
    if FAULT.startswith("told in an evaluation"):
        tell_in_an_evaluation(one)
    if FAULT.startswith("told in an update"):
        tell_in_an_update(one)
    one.train(resume_from_checkpoint="auto" if "auto" in sys.argv[4:] else "resume" in sys.argv[4:] or None)


if __name__ == "__main__":
    sys.exit(main())
