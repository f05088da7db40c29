"""`make gpu` writes its table between two marks of docs/performance.md; its comparison of output layers runs where there is no GPU."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import gpu_table
    import heads

    yield gpu_table, heads
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_what_was_measured_takes_the_place_of_what_stands_between_the_marks(benchmarks):
    gpu_table, heads = benchmarks
    given = argparse.Namespace(tokens=70, width=16, vocabulary=300, repeats=1)
    if torch.cuda.is_available():
        pytest.skip("the libraries beside it run on a GPU only")
    heads_found = heads.run(given, torch.device("cpu"))
    assert max(max(one["errors"]) for one in heads_found.values()) < 0.02
    learner = {"step": 1.5, "mfu": 0.4, "peak_above_mib": 10.0, "longest": 2048}
    rollout = {
        "graphs": {"seconds": 1.0, "tokens_per_second": 9.0, "peak_gib": 2.0},
        "generate": {"failed": "out of memory"},
    }
    found = {
        "learner_cuda.py": {"sides": {"Covey, flex": learner}},
        "heads.py": heads_found,
        "rollout_cuda.py": {"sides": rollout},
    }
    text = gpu_table.section("A Card", found)
    page = gpu_table.placed((ROOT / "docs" / "performance.md").read_text(), text)
    assert "Not measured yet." not in page
    assert "| Covey, flex | 1.50 | 40% | 10 | 2048 |" in page
    assert "| Covey, with entropy |" in page
    assert "| generate | out of memory | |  |" in page
    assert gpu_table.placed(page, text) == page, "a second run replaces the first"
