"""The same seed, the same numbers, to the bit; what only memory knows of changes no more than the last digits."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_cases import Case, compare, differences, train

from kit import threads

WIDE = {
    "per_device_train_batch_size": 64,
    "num_generations": 32,
    "max_completion_length": 32,
    "max_tokens_per_microbatch": 4096,
    "logging_steps": 1,
}


def difference(folder: Path, one: Case, other: Case) -> dict[str, float]:
    for case in (one, other):
        train(case, folder / case.name)
    return differences(one, folder / one.name, folder / other.name)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    first, second, other = (Case(name, {"max_steps": 2, "seed": seed}) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert difference(tmp_path / "same", first, second) == {}
    found = difference(tmp_path / "another", first, other)
    assert any(name.startswith("model.safetensors") for name in found)


def test_looking_at_a_run_and_saving_it_do_not_change_it(tmp_path: Path) -> None:
    watching = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "log_completions": True,
        "rollout_log_steps": 1,
    }
    quiet = Case("quiet", {"max_steps": 3, "save_steps": 3})
    watched = Case("watched", {"max_steps": 3, "save_steps": 1, "save_async": False, **watching})
    found = difference(tmp_path, quiet, watched)
    assert not [name for name in found if name.startswith("model.safetensors")]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"max_tokens_per_microbatch": 40}, id="smaller micro-batches"),
        pytest.param({"gradient_checkpointing": True}, id="activations computed again"),
        pytest.param({"logits_chunk_tokens": 4}, id="smaller chunks of logits", marks=pytest.mark.nightly),
    ],
)
def test_what_saves_memory_changes_one_step_by_rounding_alone(tmp_path: Path, changed: dict[str, object]) -> None:
    plain, small = (
        Case("plain", {"max_steps": 1, "optim": "sgd"}),
        Case("small", {"max_steps": 1, "optim": "sgd", **changed}),
    )
    found = difference(tmp_path, plain, small)
    moved = {name: size for name, size in found.items() if name.startswith("model.safetensors")}
    assert all(size < 1e-7 for size in moved.values()), moved


@pytest.mark.slow
def test_several_threads_give_the_same_run_whole_and_resumed(tmp_path: Path) -> None:
    """A micro-batch of 64 completions: torch spreads sums over threads from 32,768 elements on, more than other tests have."""
    wide = Case("wide", {**WIDE, "max_steps": 3}, at=1)
    with threads(4):
        assert compare(wide, tmp_path) == {}
        train(wide, tmp_path / "again")
    assert differences(wide, tmp_path / "whole", tmp_path / "again") == {}
