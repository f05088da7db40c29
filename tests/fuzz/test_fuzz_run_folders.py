"""Run folders and checkpoints with anything in them: read, left out, or refused in Covey's own words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import damage, damages, fuzz, json_values, look_at, only_covey_errors, small_run
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from covey.runs import RunFolder, checkpoint, checksums, manifest, serialization

Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real run folder with a checkpoint."""
    return small_run(tmp_path_factory.mktemp("original") / "run")


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a fresh copy of the run each time."""
    count = iter(range(10**9))

    def copy() -> Path:
        target = tmp_path / f"copy-{next(count)}"
        shutil.copytree(original, target)
        for older in tmp_path.glob("copy-*"):
            if older != target:
                shutil.rmtree(older)
        return target

    return copy


@fuzz
@given(which=st.integers(0, 1000), how=damages())
def test_a_damaged_record_is_read_or_refused(which: int, how: Damage, run: Callable[[], Path]) -> None:
    folder = run()
    files = sorted(p for p in folder.rglob("*") if p.is_file() and "checkpoint" not in str(p) and p.name != ".lock")
    damage(files[which % len(files)], how)
    look_at(folder)


@pytest.mark.slow
@fuzz
@given(
    content=st.dictionaries(
        st.sampled_from(["state", "attempts", "config", "algorithm", "step", "parent", "id"]), json_values
    )
)
@example(content={"state": "running", "attempts": [{"process": 1.5, "host": []}]})
@example(content={"parent": [1], "config": 3, "attempts": None})
def test_a_manifest_of_any_shape_is_read_or_refused(content: dict[str, Any], run: Callable[[], Path]) -> None:
    folder = run()
    text = json.dumps({"format": manifest.FORMAT, "schema": manifest.SCHEMA, **content})
    (folder / "run.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    look_at(folder)


@pytest.mark.slow
@fuzz
@given(rows=st.lists(json_values | st.fixed_dictionaries({"step": json_values, "reward": json_values}), max_size=5))
def test_metrics_of_any_shape_are_read(rows: list[Any], run: Callable[[], Path]) -> None:
    folder = run()
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
    look_at(folder)
    with only_covey_errors():
        RunFolder.create(folder, resume=folder / "checkpoint-2").close("stopped")


@fuzz
@given(which=st.integers(0, 1000), how=damages())
def test_a_damaged_checkpoint_is_never_resumed_from(which: int, how: Damage, run: Callable[[], Path]) -> None:
    folder = run()
    newest = folder / "checkpoint-3"
    files = sorted(path for path in newest.iterdir() if path.is_file())
    file = files[which % len(files)]
    is_whole = how(file.read_bytes()) == file.read_bytes()
    damage(file, how)
    with only_covey_errors():
        found = checkpoint.resolve("auto", folder)
        assert found is not None
        assert checksums.problems(found) == []
        assert found.name == ("checkpoint-3" if is_whole else "checkpoint-2")


@fuzz
@given(which=st.integers(0, 1000), how=damages())
def test_a_damaged_state_is_loaded_or_refused(which: int, how: Damage, run: Callable[[], Path]) -> None:
    folder = run() / "checkpoint-3"
    files = sorted(path for path in folder.iterdir() if path.name.startswith("covey"))
    damage(files[which % len(files)], how)
    with only_covey_errors():
        checkpoint.load_state(folder)


codes = st.recursive(
    json_values,
    lambda inner: st.builds(
        lambda kind, value: {f"${kind}": value},
        st.sampled_from([*serialization._SCALARS, "tuple", "dict", "object", "tensor", "array", "number", "unknown"]),
        inner | st.lists(inner, max_size=3) | st.integers(-3, 3) | st.just("t0"),
    ),
    max_leaves=6,
)


@fuzz
@given(
    tree=codes,
    objects=st.lists(st.tuples(st.sampled_from(sorted(serialization._DATACLASSES)), codes) | codes, max_size=2),
)
def test_a_state_of_any_shape_is_loaded_or_refused(tree: Any, objects: list[Any], tmp_path: Path) -> None:
    document = {"schema": serialization.SCHEMA, "objects": objects, "tree": tree}
    save_file({"t0": torch.zeros(2)}, tmp_path / "state.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(document), encoding="ascii")
    with only_covey_errors():
        serialization.read(tmp_path / "state")
