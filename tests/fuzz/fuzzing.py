"""Input from outside, made up: JSON of any shape, damaged files, a run folder to damage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from covey.errors import CoveyError
from covey.evaluation.compare.run_data import read_runs
from covey.monitor.view.reading import RunView
from covey.runs import RunFolder, checkpoint, evaluations, manifest, metrics, rollouts, status
from example_counts import examples
from kit import group

fuzz = examples(30)
odd_texts = st.sampled_from(
    ["", "\0", "\ud800", "../../x", "[", "{}", "1e999", "null", "-1", "nan", "a" * 5000, "\x1b[2J"]
)
texts = st.text(max_size=12) | odd_texts
numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 10**400, True, False])
scalars = st.none() | numbers | texts
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)


@contextmanager
def only_covey_errors(*others: type[BaseException]) -> Iterator[None]:
    """Whatever comes out of the block is an error of Covey's with a sentence in it; warnings are allowed."""
    with warnings.catch_warnings(), suppress(*others):
        warnings.simplefilter("ignore")
        try:
            yield
        except CoveyError as error:
            if not str(error).strip():
                raise AssertionError("an error without a sentence") from error


def damages() -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """Ways to damage the content of a file."""
    places = st.floats(0, 1)

    def cut(where: float) -> Callable[[bytes], bytes]:
        return lambda content: content[: int(where * len(content))]

    def flip(where: float, bit: int) -> Callable[[bytes], bytes]:
        def change(content: bytes) -> bytes:
            if not content:
                return content
            found = bytearray(content)
            found[min(int(where * len(found)), len(found) - 1)] ^= 1 << bit
            return bytes(found)

        return change

    def insert(where: float, what: bytes) -> Callable[[bytes], bytes]:
        return lambda content: content[: int(where * len(content))] + what + content[int(where * len(content)) :]

    def replace(what: bytes) -> Callable[[bytes], bytes]:
        return lambda content: what

    return (
        st.builds(cut, places)
        | st.builds(flip, places, st.integers(0, 7))
        | st.builds(insert, places, st.binary(min_size=1, max_size=20) | st.just(b"[" * 3000))
        | st.builds(replace, st.binary(max_size=50))
    )


def damage(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def small_run(folder: Path) -> Path:
    """A small real run folder with checkpoints, made here."""
    run = RunFolder.create(folder)
    run.describe(args={"seed": 1, "learning_rate": 1e-5}, algorithm="grpo", rewards=["length"])
    for step in (1, 2, 3):
        run.append_metrics(step, {"reward": 0.5, "loss": float("nan")}, {"step": 0.1})
    run.write_rollouts(1, [group(["a", "b"], uid="0:1")], [])

    def write(target: Path) -> None:
        save_file({"weight": torch.zeros(8)}, target / "model.safetensors")
        (target / "config.json").write_text("{}")

    for step in (2, 3):
        checkpoint.save(folder, step, write, {"step": step, "x": torch.arange(4), "draw": (1, 2.5, None)}, keep=None)
    run.close("stopped")
    return folder


def look_at(folder: Path) -> None:
    """Everything that reads a run folder."""
    with only_covey_errors():
        view = RunView("run", folder)
        while not view.refresh_some():
            continue
        view.overview()
    for name in ("metrics.jsonl", "events.jsonl", "alerts.jsonl"):
        if (folder / name).exists():
            assert all(isinstance(row, dict) for row in metrics.read(folder / name))
    found = manifest.read(folder / "run.json")
    if found is not None:
        assert isinstance(status.state_of(found, folder), str)
    with only_covey_errors():
        read_runs(str(folder))
    with only_covey_errors():
        for step in rollouts.steps(folder / "rollouts"):
            rollouts.read(folder / "rollouts" / f"step-{step:06d}.parquet")
    with only_covey_errors():
        for step in evaluations.steps(folder / "evaluations"):
            evaluations.read(folder / "evaluations" / "eval" / f"step-{step:06d}.parquet")
