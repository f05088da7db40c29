"""Twenty kinds of fault planted in GSM8K: nearly all are found, and hardly a sound row is accused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def found():
    spec = importlib.util.spec_from_file_location("data_check", ROOT / "benchmarks" / "data_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    train, test = (
        [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "test")
    )
    return module.measured(train, test, each=40, seed=7)


@pytest.mark.slow
def test_every_kind_of_fault_is_found_nearly_always(found):
    weak = {name: recall for name, recall in found["recall"].items() if recall < 0.9}
    assert set(weak) <= {"test row, other numbers"}
    assert all(recall > 0.6 for recall in weak.values())
    assert sum(recall == 1.0 for recall in found["recall"].values()) >= 15


def test_no_sound_row_of_the_2500_is_accused(found):
    assert found["accused"] == {}
