"""Clients teach an endpoint what they like, while it serves: short answers, polite ones, or answers in German.

    python examples/live/feedback.py --smoke               # three candidates instead of five; with each of the below
    python examples/live/feedback.py                       # short answers, of the model that ships
    python examples/live/feedback.py --likes polite        # a style, of a tiny model that is taught first
    python examples/live/feedback.py --likes german        # a language, of the same one
    python examples/live/feedback.py --guard right         # short answers, but right ones: the gate says no

Starts `covey serve MODEL --learn`, asks it word problems, and scores each answer as a user might. After every 128 scores a
candidate is trained, compared with the served version on a fixed set, and promoted or dropped. Expect: new problems are answered
as the clients like within five candidates. The fixed set guards right answers, for `short` the form of an answer (`#### number`);
short answers of the shipped model are often wrong ones, so that with `--guard right` its candidates are dropped.

A real model: `MODEL = "Qwen/Qwen2.5-0.5B-Instruct"`, a fixed set of yours, and its reward in `LIKES`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "languages")]
import task
import tiny

from covey import demo
from covey.demo.task import text_of
from covey.evaluation.intervals import wilson

Row = dict[str, Any]
MODEL = "demo"
SCORES = 128
"""Scores that make a candidate."""
TURNS = 20
"""Turns of a seed: `SCORES` problems each."""
ANSWERS = {
    "en": ("With pleasure! ", "That is the answer, and it is {}"),
    "de": ("Sehr gern! ", "Das ist die Antwort, und sie ist {}"),
}
"""Polite words and answer, of which the tiny model uses each with a probability of its own."""


def form(completions: list[Any], **columns: Any) -> list[float]:
    """1.0 where an answer ends with `#### ` and a number, right or wrong."""
    return [float(bool(re.search(r"####\s*-?\d+\s*$", text_of(one).strip()))) for one in completions]


def worked(rng: random.Random) -> Row:
    """An English question, answered rightly: a quarter of the answers in German, a quarter polite."""
    one = task.draw(rng)
    while one.is_held_out:
        one = task.draw(rng)
    polite, words = ANSWERS["de" if rng.random() < 0.33 else "en"]
    said = words.format(one.worked(task.SIGNS[one.kind]))
    return {"prompt": one.asked("en"), "completion": polite + said if rng.random() < 0.25 else said}


def taught() -> str:
    return tiny.taught("runs/polyglot", worked, steps=500)


def questions(split: str, turn: int, count: int = SCORES) -> list[Row]:
    return task.rows(split, (turn + 1) * count, ("en",))[-count:]


@dataclass(frozen=True)
class Liking:
    """Clients of one liking, the model that they ask, and the reward that guards its answers."""

    score: Callable[[str], float]
    """From -1 to 1."""
    model: Callable[[], str] = taught
    rows: Callable[[str, int], list[Row]] = questions
    """Problems of a split and a turn."""
    reward: str = "math"
    rate: float = 1e-3
    """Learning rate."""
    batch: int = 32


LIKES = {
    "short": Liking(
        lambda text: -min(1.0, len(text) / 60),
        lambda: MODEL,
        lambda split, turn: demo.rows(split, SCORES, seed=turn),
        f"{__file__}:form",
        2e-3,
        16,
    ),
    "polite": Liking(lambda text: 1.0 if text.startswith(("With pleasure!", "Sehr gern!")) else -1.0),
    "german": Liking(lambda text: 1.0 if "die Antwort" in text else -1.0),
}


def call(url: str, page: str, body: Row | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{page}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def asked(url: str, rows: list[Row], turn: int, score: Callable[[str], float] | None = None) -> list[str]:
    """Answers to the rows, sixteen at a time, each scored where there is a `score`. Seeded, so that the weights decide them."""

    def one(numbered: tuple[int, Row]) -> str:
        seed, row = numbered
        said = call(url, "chat/completions", {"messages": row["prompt"], "max_tokens": 48, "seed": 1000 * turn + seed})
        text = str(said["choices"][0]["message"]["content"])
        if score is not None:
            call(url, "feedback", {"id": said["id"], "score": score(text)})
        return text

    with ThreadPoolExecutor(16) as clients:
        return list(clients.map(one, enumerate(rows)))


def teach(url: str, liking: Liking, candidates: int, first_turn: int) -> None:
    """Score answers until so many candidates were judged, and print what became of each."""
    for number in range(candidates):
        turn = first_turn + number
        scores = [liking.score(text) for text in asked(url, liking.rows("train", turn), turn, liking.score)]
        while len(judged := call(url, "learning")["candidates"]) <= number:
            time.sleep(0.2)
        verdict = next(iter(judged[number]["verdicts"].values()))
        print(
            f"mean score {mean(scores):+.2f}; candidate {number + 1} was {judged[number]['outcome']}, fixed set "
            f"{verdict['served']:.3f} -> {verdict['candidate']:.3f} (95% {verdict['low']:+.3f} to {verdict['high']:+.3f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--likes", choices=LIKES, default="short")
    parser.add_argument("--guard", choices=("form", "right"), default="form", help="of --likes short")
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="other problems and other draws, of the same model")
    parser.add_argument("--smoke", action="store_true", help="three candidates, a smaller fixed set")
    given = parser.parse_args()
    first_turn = TURNS * given.seed
    liking = LIKES[given.likes]
    reward = "demo" if given.likes == "short" and given.guard == "right" else liking.reward
    with tempfile.TemporaryDirectory() as folder:
        fixed = Path(folder, "fixed.jsonl")
        fixed.write_text(
            "".join(json.dumps(row) + "\n" for turn in (0, 1, 2) for row in liking.rows("test", first_turn + turn))
        )
        command = [sys.executable, "-m", "covey", "serve", liking.model(), "--port", "0", "--learn"]
        command += ["--learn-folder", f"{folder}/learning", "--fixed-set", str(fixed), "--reward", reward]
        command += ["--fixed-set-prompts", "100" if given.smoke else "300", "--max-output-tokens", "48"]
        command += ["--tolerance", "0.1" if given.smoke else "0.05"]
        command += [
            "--scores-per-candidate",
            str(SCORES),
            "--per-device-train-batch-size",
            "16",
            "--learning-rate",
            str(liking.rate),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split(" at ")[1].split()[0]
                new = liking.rows("test", first_turn + 9)
                before = asked(url, new, first_turn + 9)
                teach(url, liking, 3 if given.smoke else given.candidates, first_turn)
                after = asked(url, new, first_turn + 9)
            finally:
                server.terminate()
    for when, texts in (("before", before), ("after", after)):
        scores = [liking.score(text) for text in texts]
        share = mean(score > 0 for score in scores)
        low, high = wilson(share, len(scores))
        liked = f"{share:.0%} {given.likes} (95% {low:.0%} to {high:.0%})"
        length = f"{mean(len(text) for text in texts):.1f} characters an answer"
        print(f"{when}: new problems, {length if given.likes == 'short' else liked}")


if __name__ == "__main__":
    main()
