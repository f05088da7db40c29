"""Run folders as no run leaves them, each made beside a good one."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BAD: dict[str, Callable[[Path], object]] = {}
OUTSIDE = "a secret of somebody else"


def bad(name: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    def keep(make: Callable[[Path], object]) -> Callable[[Path], object]:
        BAD[name] = make
        return make

    return keep


def outside(run: Path) -> Path:
    """A file outside the folders that are shown."""
    path = run.parent.parent / "outside.jsonl"
    path.write_text(
        json.dumps({"step": 1, "reward": 666.0, "said": OUTSIDE, "format": "covey-run", "name": OUTSIDE}) + "\n"
    )
    return path


def rollout(run: Path, table: dict[str, Any], step: int = 1) -> None:
    (run / "rollouts").mkdir(exist_ok=True)
    pq.write_table(pa.table(table), run / "rollouts" / f"step-{step:06d}.parquet")


FILES = ("run.json", "metrics.jsonl", "alerts.jsonl", "events.jsonl", "evaluations.jsonl")


def each(make: Callable[[Path], object], names: tuple[str, ...] = FILES) -> Callable[[Path], object]:
    return lambda run: [make(run / name) for name in names]


def nested(depth: int) -> str:
    return '{"format": "covey-run", "step": 1, "said": ' + '{"a": [' * depth + "1" + "]}" * depth + "}\n"


def sock(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may be 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def foreign(value: Any) -> Callable[[Path], object]:
    """Every field that is read holds this."""
    names = ("state", "created", "step", "algorithm", "parent", "attempts", "config", "model", "rewards", "sources", "dataset",
             "versions", "name", "time", "kind", "severity", "evidence", "try_this", "reward", "set", "rule")  # fmt: skip
    row = {"format": "covey-run", **dict.fromkeys(names, value)}
    lines = [json.dumps(row), json.dumps({**row, "step": 1}), json.dumps({**row, "step": 2, "said": value})]
    return lambda run: [
        (run / name).write_text(lines[0] if name == "run.json" else "\n".join([*lines, ""])) for name in FILES
    ]


BAD |= {
    "pipes in place of files": each(os.mkfifo),
    "folders in place of files": each(Path.mkdir),
    "sockets in place of files": each(sock),
    "empty files": each(Path.touch),
    "binary garbage": each(lambda path: path.write_bytes(random.Random(0).randbytes(100_000))),
    "text that is not UTF-8": each(
        lambda path: path.write_bytes(b'{"step": 1, "said": "\xff\xfe", "format": "covey-run"}\n')
    ),
    "zeros": each(lambda path: path.write_bytes(bytes(1 << 20))),
    "lines nested 500 deep": each(lambda path: path.write_text(nested(250))),
    "lines nested 100,000 deep": each(lambda path: path.write_text(nested(50_000) * 3)),
    "lines of opening brackets": each(lambda path: path.write_text("[" * 3_000_000 + "\n")),
    "torn lines": each(lambda path: path.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')),
    "one line of 40 MB": each(lambda path: path.write_text('{"step": 1, "said": "' + "x" * 40_000_000 + '"}\n')),
    "a line without end of 60 MB": each(lambda path: path.write_text("x" * 60_000_000)),
    "links to a file outside": lambda run: [(run / name).symlink_to(outside(run)) for name in FILES],
    "links to an endless device": each(lambda path: path.symlink_to("/dev/zero")),
    "links in a circle": each(lambda path: path.symlink_to(path)),
    "lists in every field": foreign([1, [2], {"a": None}]),
    "mappings in every field": foreign({"a": {"b": []}}),
    "text in every field": foreign("x"),
    "huge numbers in every field": foreign(10**400),
    "infinity in every field": foreign(float("inf")),
    "nothing in every field": foreign(None),
    "true in every field": foreign(True),
}


@bad("a hundred thousand metrics, each in a line of its own")
def _(run: Path) -> None:
    lines = (f'{{"step": {at}, "m{at}": 1.0}}\n' for at in range(100_000))
    (run / "metrics.jsonl").write_text("".join(lines))


@bad("a hundred thousand metrics in one line")
def _(run: Path) -> None:
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **{f"m{at}": at for at in range(100_000)}}) + "\n")


@bad("many metrics, then a million short lines")
def _(run: Path) -> None:
    first = json.dumps({"step": 1, **{f"m{at}": at for at in range(1900)}})
    (run / "metrics.jsonl").write_text(first + "\n" + '{"step":2}\n' * 300_000)


@bad("steps that are no steps")
def _(run: Path) -> None:
    steps = ["NaN", "-1", "1e400", "9" * 5000, "1.5", '"1"', "true", "[1]", "{}", "-9007199254740999"]
    (run / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "reward": 1, "seconds/step": 1}}\n' for step in steps)
    )


@bad("rollouts that are a link to a folder outside")
def _(run: Path) -> None:
    place = run.parent.parent / "elsewhere"
    place.mkdir()
    rollout(place, {"group": [0], "prompt_uid": [OUTSIDE], "finish": ["stop"], "num_tokens": [1], "prompt": [OUTSIDE]})
    (run / "rollouts").symlink_to(place / "rollouts")
    (run / "evaluations").symlink_to(place)


@bad("rollouts that are links, pipes, folders and garbage")
def _(run: Path) -> None:
    (run / "rollouts").mkdir()
    file = "step-00000{}.parquet"
    (run / "rollouts" / file.format(1)).symlink_to(outside(run))
    os.mkfifo(run / "rollouts" / file.format(2))
    (run / "rollouts" / file.format(3)).mkdir()
    (run / "rollouts" / file.format(4)).write_bytes(b"PAR1" + bytes(1000) + b"PAR1")
    (run / "rollouts" / file.format(5)).symlink_to("/dev/zero")


@bad("rollouts that are a pipe")
def _(run: Path) -> None:
    os.mkfifo(run / "rollouts")


@bad("rollouts with columns of other types")
def _(run: Path) -> None:
    rollout(run, {"group": ["a"], "prompt_uid": [1], "finish": [2.5], "num_tokens": ["x"], "reward": ["y"]})
    rollout(run, {"group": [0], "prompt_uid": ["u"], "finish": ["stop"], "num_tokens": [1], "reward": [1.0], "prompt": [7],
                  "completion": [[1, 2]], "token_ids": [["a"]], "columns": ["[" * 2000], "logprobs": [[{"a": 1}]],
                  "old_logp": [[0.5, 1.0]]}, step=2)  # fmt: skip
    rollout(run, {"group": [0, 0], "prompt_uid": ["u", "u"], "finish": ["stop", None], "num_tokens": [1, 1], "reward": [1.0, None],
                  "prompt": ["p", "p"], "completion": ["c", "d"], "token_ids": [[-5, 2**40], [1]], "columns": ["3", "3"],
                  "logprobs": [[0.5], None], "old_logp": [[0.5, 1.0], [1.0]]}, step=3)  # fmt: skip


@bad("a file of rollouts of a million rows in a few bytes")
def _(run: Path) -> None:
    count = 300_000
    rollout(run, {"group": pa.array([0] * count, pa.int32()), "prompt_uid": ["u"] * count, "finish": ["stop"] * count,
                  "num_tokens": [1] * count, "completion": ["x" * 100] * count})  # fmt: skip


@bad("a tokenizer that is a pipe, one that is garbage, and one outside")
def _(run: Path) -> None:
    rollout(run, {"group": [0], "prompt_uid": ["u"], "finish": ["stop"], "num_tokens": [1], "reward": [1.0], "prompt": ["p"],
                  "completion": ["c"], "token_ids": [[1]]})  # fmt: skip
    for step in (1, 2, 3):
        (run / f"checkpoint-{step}").mkdir()
    os.mkfifo(run / "checkpoint-3" / "tokenizer.json")
    (run / "checkpoint-2" / "tokenizer.json").write_text('{"model": 1}')
    (run / "checkpoint-1" / "tokenizer.json").symlink_to(outside(run))


@bad("a manifest that names a model strangely")
def _(run: Path) -> None:
    os.mkfifo(run / "tokenizer.json")
    (run / "run.json").write_text(json.dumps({"format": "covey-run", "config": {"model": f"{run}\0x"}}))
    rollout(run, {"group": [0], "prompt_uid": ["u"], "finish": ["stop"], "num_tokens": [1], "token_ids": [[1]]})


@bad("only a link to another run's manifest")
def _(run: Path) -> None:
    (run / "run.json").symlink_to(run.parent / "good" / "run.json")


@bad("no file at all but an empty folder of rollouts")
def _(run: Path) -> None:
    (run / "rollouts").mkdir()


@bad("a manifest of 40 MB")
def _(run: Path) -> None:
    (run / "run.json").write_text(
        json.dumps({"format": "covey-run", "config": {f"k{at}": "x" * 40 for at in range(400_000)}})
    )


@bad("a pipe in place of the folder")
def _(run: Path) -> None:
    shutil.rmtree(run)
    os.mkfifo(run)


@bad("a folder that may not be read")
def _(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "metrics.jsonl").chmod(0)
    run.chmod(0o300)
