"""Clients that prefer short answers teach an endpoint to write them, while it serves.

Starts `covey serve demo --learn`, asks it arithmetic problems, and scores each answer by its length as a user might. After every
round of scores a candidate is trained, compared with the served version on a fixed set, and promoted or dropped. The fixed set
guards the form of an answer (`#### number`); with `--guard right` it guards right answers, which short ones of this model
often are not, and the gate says no.

    python examples/live/feedback.py                       # five candidates
    python examples/live/feedback.py --guard right
    python examples/live/feedback.py --smoke               # two candidates

For a model of your own change MODEL, FIXED_SET and REWARD.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any

from covey.demo.task import rows, text_of

MODEL, FIXED_SET = "demo", "demo:test"
REWARD = {"form": f"{__file__}:form", "right": "demo"}
SCORES = 128
"""Scores that make a candidate."""


def form(completions: list[Any], **columns: Any) -> list[float]:
    """1.0 where an answer ends with `#### ` and a number, right or wrong."""
    return [float(bool(re.search(r"####\s*-?\d+\s*$", text_of(one).strip()))) for one in completions]


def score_of(answer: str) -> float:
    """A client's liking: 0 for an empty answer, -1 for one of 60 characters or more."""
    return -min(1.0, len(answer) / 60)


def call(url: str, page: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{page}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def asked(url: str, row: dict[str, Any], *, scores: bool) -> tuple[int, str]:
    """Version and text of an answer, which is scored if `scores`."""
    said = call(url, "chat/completions", {"messages": row["prompt"], "max_tokens": 48})
    text = said["choices"][0]["message"]["content"]
    if scores:
        call(url, "feedback", {"id": said["id"], "score": score_of(text)})
    return said["weights_version"], text


def round_of(url: str, problems: list[dict[str, Any]], *, scores: bool) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(16) as clients:
        return list(clients.map(lambda row: asked(url, row, scores=scores), problems))


def teach(url: str, candidates: int) -> None:
    """Score answers until so many candidates were judged, and print what became of each."""
    for number in range(candidates):
        answers = round_of(url, rows("train", SCORES, seed=number), scores=True)
        while len(judged := call(url, "learning")["candidates"]) <= number:
            time.sleep(0.2)
        (last,) = judged[number:]
        verdict = next(iter(last["verdicts"].values()))
        version, length = answers[0][0], mean(len(text) for _, text in answers)
        print(
            f"version {version}: {length:.1f} characters; candidate {number + 1} was {last['outcome']}, fixed set "
            f"{verdict['served']:.3f} -> {verdict['candidate']:.3f} (95% {verdict['low']:+.3f} to {verdict['high']:+.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guard", choices=("form", "right"), default="form")
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "covey", "serve", MODEL, "--port", "0", "--learn", "--learn-folder", folder]
        command += ["--fixed-set", FIXED_SET, "--fixed-set-prompts", "100" if given.smoke else "300"]
        command += ["--reward", REWARD[given.guard], "--tolerance", "0.1" if given.smoke else "0.05"]
        command += ["--scores-per-candidate", str(SCORES), "--learn-batch-size", "16", "--learning-rate", "2e-3"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split(" at ")[1].split()[0]
                new = rows("test", 128, seed=7)
                before = round_of(url, new, scores=False)
                teach(url, 2 if given.smoke else given.candidates)
                after = round_of(url, new, scores=False)
            finally:
                server.terminate()
    for answers in (before, after):
        lengths = mean(len(text) for _, text in answers)
        print(f"new problems, version {answers[0][0]}: {lengths:.1f} characters an answer")


if __name__ == "__main__":
    main()
