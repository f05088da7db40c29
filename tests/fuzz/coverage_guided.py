"""Looks for input that breaks a reader, guided by which lines of Covey each try reaches. Not collected by pytest: run by hand.

    pip install atheris
    python tests/fuzz/coverage_guided.py TARGET [-max_total_time=300] [-seed=1] [FOLDER of earlier finds]

Targets: configuration, command_line, row, data, reward, answer, judge, run, metrics, seal, state. It ends with the input and the traceback
of the first error that is not one of Covey's own, or of a try that takes more than a second or 4 GB; `crash-...` holds the input.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "fuzz")]

# ruff: noqa: E402 - paths first
import torch  # not instrumented: only Covey's own lines guide the search

with atheris.instrument_imports(include=["covey"]):
    from fuzzing import look_at, only_covey_errors, small_run  # imports the rest of Covey

    from covey.cli import train
    from covey.cli.columns import column_map
    from covey.cli.flags import read_flags, read_yaml, typed
    from covey.data import PromptStream, load
    from covey.data.checks import check_dataset
    from covey.data.prompts import to_prompt
    from covey.rewards.builtin import answers, bleu, chat_endpoint, judge_rewards, overlap, text
    from covey.rewards.builtin import format as shape
    from covey.rewards.contract import to_scores
    from covey.runs import checkpoint, checksums, manifest, serialization
from safetensors.torch import save_file

from kit import tiny_tokenizer

PLACE = (
    Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()) / f"covey-fuzz-{'-'.join(sys.argv[1:2])}"
)
shutil.rmtree(PLACE, ignore_errors=True)  # of the last time: libFuzzer ends the process at once
PLACE.mkdir()
ROW = (
    "prompt",
    "role",
    "content",
    "user",
    "system",
    "assistant",
    "answer",
    "chat_template_kwargs",
    "text",
    "type",
    "image",
)
LINE = (
    "step",
    "time",
    "reward",
    "loss",
    "seconds/step",
    "kind",
    "said",
    "details",
    "rule",
    "severity",
    "evidence",
    "try_this",
)
MANIFEST = (
    "format", manifest.FORMAT, "schema", "state", "running", "finished", "attempts", "process", "host", "started", "config", "id",
    "algorithm", "step", "parent", "versions", "dataset", "rewards", "model", "hardware", "git", "sources", "seed", "working_folder",
)  # fmt: skip
STATE = (
    "schema", "objects", "tree", "t0", *serialization._DATACLASSES,
    *(f"${kind}" for kind in (*serialization._SCALARS, "tuple", "dict", "object", "tensor", "array", "number")),
)  # fmt: skip
TOKENIZER = tiny_tokenizer()
FLAGS = train.flags()
TYPES = train.flag_types()


def configuration(data: bytes) -> None:
    path = PLACE / "options.yaml"
    path.write_bytes(data)
    with only_covey_errors():
        found = read_yaml(path, FLAGS, train.HINTS)
        typed(found, {name: TYPES.get(name, str) for name in found})


def command_line(data: bytes) -> None:
    words = data.decode("utf-8", "replace").split("\n")
    with only_covey_errors():
        found = read_flags(words, FLAGS, (), train.HINTS)
        typed(found, {name: TYPES.get(name, str) for name in found})
    with only_covey_errors():
        column_map({"columns": words})


def row(data: bytes) -> None:
    found = _made(data, ROW)
    if isinstance(found, dict):
        with only_covey_errors():
            to_prompt(found, "0:1", "Row 1", TOKENIZER, {})


def data(content: bytes) -> None:
    path = PLACE / "rows.jsonl"
    path.write_bytes(content)
    with only_covey_errors():
        PromptStream(check_dataset(load(path)), TOKENIZER, max_prompt_length=64).take(3)


def reward(data: bytes) -> None:
    with only_covey_errors(TypeError, ValueError):
        to_scores(_made(data, ["1"]) if len(data) % 2 else [_made(data[:9], ["1"]), _made(data[9:], ["1"])], 2, "odd")


def answer(data: bytes) -> None:
    """What a model wrote, as the rewards read it."""
    said, _, gold = data.decode("utf-8", "replace").partition("\0")
    for find in (answers.marked_answer, answers.final_answer, answers.gold_answer, answers.number, answers.is_plain):
        find(said)
    answers.is_same(said, gold)
    shape.read_json(said)
    text.format_reward([said])
    text.think_format_reward([said])
    overlap.Rouge()([said], reference=[gold])
    bleu.Bleu(tokenize="zh")([said], reference=[gold])


def judge(data: bytes) -> None:
    """What a server sent: its body, and the headers that say when to come back."""
    try:
        said = chat_endpoint._reply_of(data).text
    except chat_endpoint._PassingError:
        said = data.decode("utf-8", "replace")
    for read in (judge_rewards._winner, JUDGE._mark):
        with suppress(chat_endpoint.ReplyError):
            read(said)
    chat_endpoint._retry_after({"Retry-After": data.decode("latin-1")})


def run(data: bytes) -> None:
    made = _made(data, MANIFEST)
    made = {"format": manifest.FORMAT, "schema": manifest.SCHEMA, **(made if isinstance(made, dict) else {})}
    (RUN / "run.json").write_bytes(data[1:] if data[:1] == b"1" else json.dumps(made).encode())
    look_at(RUN)


def metrics_lines(data: bytes) -> None:
    size = max(1, len(data) // 3)
    lines = [json.dumps(_made(data[i : i + size], LINE)) for i in range(0, 3 * size, size)]
    for name in ("metrics.jsonl", "events.jsonl", "alerts.jsonl"):
        (RUN / name).write_bytes(data[1:] if data[:1] == b"1" else "\n".join(lines).encode())
    look_at(RUN)


def sealed(data: bytes) -> None:
    """A manifest whose own checksum is right: what follows it is reached too."""
    folder = RUN / "checkpoint-3"
    found = checksums._DIGEST.search(data.decode("latin-1"))
    if found:
        blank = data.replace(found[1].encode(), checksums._UNSET.encode())
        data = blank.replace(checksums._UNSET.encode(), checksums._digest(blank).encode())
    (folder / checksums.NAME).write_bytes(data)
    with only_covey_errors():
        checksums.problems(folder)
    with only_covey_errors():
        checkpoint.latest(RUN)


def state(data: bytes) -> None:
    half = len(data) // 2
    made = {"schema": serialization.SCHEMA, "objects": [_made(data[:half], STATE)], "tree": _made(data[half:], STATE)}
    (PLACE / "state.json").write_bytes(data[1:] if data[:1] == b"1" else json.dumps(made).encode())
    with only_covey_errors():
        serialization.read(PLACE / "state")


def _made(data: bytes, words: Sequence[str]) -> Any:
    """A JSON value of these bytes: they choose shapes, numbers, these words and others, so that a change of one changes little."""
    given = atheris.FuzzedDataProvider(data)

    def value(depth: int) -> Any:
        kind = given.ConsumeIntInRange(0, 9 if depth < 5 else 6)
        if kind <= 1:
            return word()
        if kind == 2:
            return given.ConsumeIntInRange(-3, 3)
        if kind == 3:
            return given.ConsumeFloat()
        if kind == 4:
            return given.PickValueInList(
                [None, True, False, 10**400, -(2**63), float("nan"), float("inf"), "\ud800", ""]
            )
        if kind == 5:
            return given.ConsumeInt(8)
        if kind == 6:
            return given.ConsumeUnicode(8)
        count = given.ConsumeIntInRange(0, 4)
        return [value(depth + 1) for _ in range(count)] if kind == 7 else table(depth, count)

    def table(depth: int, count: int) -> dict[str, Any]:
        return {word(): value(depth + 1) for _ in range(count)}

    def word() -> str:
        return given.PickValueInList(list(words)) if given.ConsumeProbability() < 0.9 else given.ConsumeUnicode(6)

    return table(0, given.ConsumeIntInRange(1, 6)) if given.ConsumeBool() else value(0)


RUN = small_run(PLACE / "run")
JUDGE = judge_rewards.JudgeReward("http://127.0.0.1:9/v1", "m", rubric="Good?", low=0, high=10)
save_file({"t0": torch.zeros(2)}, PLACE / "state.safetensors")
TARGETS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "configuration": (configuration, [b"max_steps: 3\nlearning_rate: 1e-5\nreward: [demo]\ncolumns: [a=b]\n"]),
    "command_line": (command_line, [b"--max-steps\n3\n--reward\ndemo\n--reward-weights\n[1, 2]\n--bf16"]),
    "row": (row, [bytes(range(0, 250, 3))]),
    "data": (data, [b'{"prompt": "Hi", "answer": "3"}\n{"prompt": "Ho", "answer": "4"}\n']),
    "reward": (reward, [bytes(range(0, 250, 3)), b"\1\2" * 9]),
    "answer": (answer, [rb"#### 42", rb"\boxed{\frac{1}{2}}", b"The answer is 3.5 apples", b"<answer>x = 1</answer>"]),
    "judge": (
        judge,
        [
            b'{"choices": [{"message": {"content": "{\\"score\\": 8}"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}',
            b'{"reason": "so", "score": 7, "winner": "A"}',
            b"2.5",
        ],
    ),
    "run": (run, [b"1" + (RUN / "run.json").read_bytes(), bytes(range(0, 250, 2))]),
    "metrics": (metrics_lines, [b"1" + (RUN / "metrics.jsonl").read_bytes(), bytes(range(0, 250, 2))]),
    "seal": (sealed, [(RUN / "checkpoint-3" / checksums.NAME).read_bytes()]),
    "state": (state, [b"1" + file.read_bytes() for file in sorted((RUN / "checkpoint-3").glob("covey*.json"))]),
}


def main(words: list[str]) -> None:
    if len(words) < 2 or words[1] not in TARGETS:
        raise SystemExit(f"usage: {words[0]} {'|'.join(TARGETS)} [libFuzzer's options]")
    look, seeds = TARGETS[words[1]]
    corpus = PLACE / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(seeds):
        (corpus / f"seed-{i}").write_bytes(seed)
    given = ["-timeout=10", "-rss_limit_mb=4096", "-max_len=4096", *words[2:], str(corpus)]
    atheris.Setup([words[0], *given], look)
    atheris.Fuzz()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv)
