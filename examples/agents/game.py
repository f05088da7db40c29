"""GRPO with turn advantages on a small text game: walk along a line of seven places to a flag, `left` or `right`, with a reward a turn.

    python examples/agents/game.py --smoke      # half a minute on one core; without --smoke four

The shipped model is first taught to walk at random, then trained with GiGPO through the run's own endpoint. The game is a process of its
own. `--faults`: one game in eight hangs, is killed or answers with broken JSON; those episodes alone are lost.
A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and what it is to answer in the prompt.
Expect: in 100 games that were not trained on it reaches the flag in one of seven before and in one of four after. The smoke shows that
everything runs; with two steps its reward does not rise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PLACES, MOST_MOVES = 7, 6
FAULTS = ("hangs", "is killed", "writes no JSON")
MET: list[str] = []
"""Faults that a game met, each in an episode of its own."""


def line(place: int, flag: int) -> str:
    return f"You are at {place}, the flag is at {flag}."


def messages(said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": said}]


# -- the game, in a process of its own ------------------------------------------------------------------------------


def serve() -> None:
    """Commands and answers as JSON lines over standard input and output."""
    place = flag = 0
    for command in map(json.loads, sys.stdin):
        if (fault := command.get("fault")) == "hangs":
            time.sleep(3600)
        elif fault == "is killed":
            os.kill(os.getpid(), 9)
        elif fault == "writes no JSON":
            print("<html>502 Bad Gateway</html>", flush=True)
            continue
        if "start" in command:
            place, flag = command["start"]
            before = after = abs(flag - place)
        else:
            before = abs(flag - place)
            place = min(PLACES - 1, max(0, place + command["step"]))
            after = abs(flag - place)
        print(
            json.dumps({"said": line(place, flag), "reward": (before - after) / 6, "over": place == flag}), flush=True
        )


class Game:
    """A session of the game."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-S", __file__, "serve"], stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Game:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, seconds: float = 5.0, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None  # noqa: PT018
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"the game did not answer within {seconds:g} seconds")
        return json.loads(self.process.stdout.readline())


# -- the agent ------------------------------------------------------------------------------------------------------


def main(row: dict[str, Any], client: Any, model: str, seed: int) -> dict[str, Any]:
    """Play one game. Each move is a conversation of its own turn: what the game says, and the answer."""
    rewards, is_over = [], False
    with Game() as game:
        seen = game.ask(60.0, start=[row["place"], row["flag"]])  # its process begins
        talk = messages(seen["said"])
        for move in range(MOST_MOVES):
            said = client.chat.completions.create(model=model, messages=talk, max_tokens=4).choices[0].message.content
            step = {"left": -1, "right": 1}.get(said.strip(), 0)
            fault = row["fault"] if move == 1 and seed % 8 == 0 else None
            MET.extend([fault] if fault else [])
            seen = game.ask(step=step, fault=fault)
            rewards.append(seen["reward"] if step else -0.2)  # what is no move costs
            if is_over := seen["over"]:
                break
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": seen["said"]}]
    rewards[-1] += float(is_over)
    return {"score": sum(rewards), "turn_rewards": rewards, "reached": is_over}


def reached(reached: list[bool], **columns: Any) -> list[float]:
    """Watched, not trained on: its weight is 0."""
    return [float(one) for one in reached]


def rows(count: int, seed: int, has_faults: bool) -> Any:
    from datasets import Dataset

    rng, found = random.Random(seed), []
    for _ in range(count):
        place, flag = rng.sample(range(PLACES), 2)
        fault = rng.choice(FAULTS) if has_faults else None
        found.append({"prompt": messages(line(place, flag)), "place": place, "flag": flag, "fault": fault})
    return Dataset.from_list(found)


def train(folder: Path, steps: int, is_smoke: bool, has_faults: bool, seed: int) -> None:
    from calculator import share
    from warm_up import STEPS, warm_up

    from covey import GRPOConfig, GRPOTrainer

    started, count = time.process_time(), 4 if is_smoke else 100
    if not (folder / "warm" / "config.json").exists():
        warm_up("game", folder / "warm", 4 if is_smoke else STEPS["game"])
    args = GRPOConfig(
        output_dir=str(folder / f"gigpo-{seed}"),
        max_steps=2 if is_smoke else steps,
        per_device_train_batch_size=16 if is_smoke else 64,
        per_device_eval_batch_size=64,
        num_generations=8,
        num_generations_eval=1,
        max_completion_length=256,
        learning_rate=5e-4,
        seed=seed,
        reward_weights=[0.0],  # of `reached`; the agent's own score has 1
        agent_concurrency=32,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
    )
    data, held_out = rows(16 if is_smoke else 1000, 1, has_faults), rows(count, 2, False)
    model = str(folder / "warm")
    trainer = GRPOTrainer(model, reached, args, data, held_out, agent=main, algorithm="gigpo")
    for when in ("before", "after"):
        print(f"{when}: reaches the flag {share(trainer.evaluate()['eval_rewards/reached/mean'], count)}")
        if when == "before":
            trainer.train()
    lost = [one["agents/lost"] for one in trainer.state.log_history if "agents/lost" in one and "loss" in one]
    count = round(sum(lost) * args.per_device_train_batch_size)
    print(f"episodes lost: {sum(lost) / max(1, len(lost)):.1%} in {len(lost)} steps, {count} for {len(MET)} faults met")
    print(f"CPU minutes: {(time.process_time() - started) / 60:.1f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
        raise SystemExit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/game"))
    parser.add_argument("--faults", action="store_true", help="one game in eight fails")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    given = parser.parse_args()
    train(given.folder, given.steps, given.smoke, given.faults, given.seed)
