"""`make gpu`: parts with a time limit each, results that add up over calls, and a table between two marks of docs/performance.md."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from forked import run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import gpu
    import heads

    yield gpu, heads
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def session_of(gpu, folder, **more):
    given = {"is_tiny": False, "deadline": time.monotonic() + 60, "peer": None, "environment": {}} | more
    return gpu.Session(sys.executable, folder, **given)


STEP = {
    "device": "A Card",
    "torch": "9.9",
    "step": 2.0,
    "first": 8.0,
    "parts": {"rollout": [1.0, 0.8], "learn": [2.0, 1.2]},
    "reserved_gib": 7.0,
    "profile": {},
}


def test_what_was_measured_takes_the_place_of_what_stands_between_the_marks(benchmarks):
    gpu, _ = benchmarks
    side = {"seconds": 1.0, "tokens_per_second": 9000.0, "roofline": 0.5, "peak_gib": 2.0}
    found = {
        "covey": STEP,
        "trl": STEP | {"step": 17.5, "reserved_gib": 11.4},
        "lora_covey": {"failed": "cut after 75 s"},
        "rollout": {
            "size": "0.5b",
            "tables": {
                "64": {"plan_seconds": 0.48, "sides": {"graphs": side}},
                "512": {"plan_seconds": None, "sides": {"graphs": {"failed": "out of memory"}}},
            },
        },
        "learner": {"sides": {"Covey, flex": {"step": 1.5, "mfu": 0.4, "peak_above_mib": 10.0}}},
        "tests": {"tests": "75 passed in 80 s"},
    }
    text = gpu.section(found, "abc1234")
    page = gpu.placed((ROOT / "docs" / "performance.md").read_text(), text)
    assert "Measured on one A Card, torch 9.9" in page
    assert (
        "| 0.5B, full, 32 x 8 completions of 512 tokens | 17.50 | 2.00 | 8.8x | 0.80, 1.20 | 8.0 | 11.4 | 7.0 |" in page
    )
    assert "| 7B LoRA r=16 on bfloat16 weights, 8 x 8 of 256 | | cut after 75 s | | | | | |" in page
    assert "| 64 | 1.00 | 9000 | 50% | 0.48 |" in page
    assert "| 512 | out of memory | | | |" in page
    assert "| Covey, flex | 1.50 | 40% | 10 |" in page
    assert "75 passed" in page
    assert gpu.placed(page, text) == page, "a second run replaces the first"


def test_a_part_is_cut_at_its_limit_with_its_children_and_the_next_one_is_measured(benchmarks, tmp_path):
    gpu, _ = benchmarks
    session = session_of(gpu, tmp_path)
    child = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(50)']).wait()"
    )
    session.run([gpu.Call("slow", [sys.executable, "-c", child], 1)])
    session.run([gpu.Call("quick", [sys.executable, "-c", "print('noise'); print('{\"device\": \"A Card\"}')"], 30)])
    session.run([gpu.Call("broken", [sys.executable, "-c", "raise ValueError('no such card')"], 30)])
    assert session.results["slow"]["failed"].startswith("cut after ")
    assert session.results["quick"] == {"device": "A Card"}
    assert session.results["broken"]["failed"] == "exit code 1: ValueError: no such card"
    assert session.failed == ["slow", "broken"]
    assert json.loads((tmp_path / "results.json").read_text()) == session.results


def test_failed_tests_are_named_and_do_not_end_the_measuring(benchmarks, tmp_path):
    gpu, _ = benchmarks
    session = session_of(gpu, tmp_path)
    said = "print('FAILED tests/test_x.py::test_y'); print('1 failed, 2 passed in 3.0s'); raise SystemExit(1)"
    session.run([gpu.Call("tests", [sys.executable, "-c", said], 30)])
    assert session.results["tests"] == {
        "tests": "1 failed, 2 passed in 3.0s",
        "lines": ["FAILED tests/test_x.py::test_y"],
    }
    assert not session.failed


def test_tests_that_failed_before_their_part_was_cut_are_named(benchmarks, tmp_path):
    gpu, _ = benchmarks
    session = session_of(gpu, tmp_path)
    said = "import time; print('[gw0] [ 50%] FAILED test_x.py::test_a', flush=True); time.sleep(50)"
    session.run([gpu.Call("tests", [sys.executable, "-S", "-c", said], 4)])
    assert session.results["tests"]["failed"].startswith("cut after ")
    assert session.results["tests"]["lines"] == ["FAILED test_x.py::test_a"]
    assert gpu.failures(["[gw0] [ 9%] FAILED x.py::a[b c] ", "FAILED x.py::a[b c] - no", "passed"]) == [
        "FAILED x.py::a[b c] - no"
    ]


@pytest.mark.slow
def test_pytest_names_failed_tests_before_its_end(benchmarks, tmp_path):
    gpu, _ = benchmarks
    failing = tmp_path / "test_x.py"
    failing.write_text("import time\n\n\ndef test_a():\n    assert 0\n\n\ndef test_b():\n    time.sleep(500)\n")
    session = session_of(gpu, tmp_path / "out")
    session.out.mkdir()
    command = [sys.executable, "-u", "-m", "pytest", "-n", "1", "-vv", "-p", "no:cacheprovider", str(failing)]
    session.run([gpu.Call("tests", command, 30)])
    assert [line.split("::")[-1] for line in session.results["tests"]["lines"]] == ["test_a"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["stepps"], "'stepps' is no part; take some of steps, rollout, tests, lora, learner."),
        (["--tiny"], "--device cpu and --tiny go together"),
        pytest.param([], "PyTorch sees no CUDA device here", marks=pytest.mark.nightly),  # it imports PyTorch
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(tmp_path, words, said):
    if torch.cuda.is_available() and not words:
        pytest.skip("there is a device")
    done = run(ROOT / "benchmarks" / "gpu.py", "--out", tmp_path, *words)
    assert done.returncode == 1
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.nightly
def test_every_script_runs_end_to_end_at_toy_size(tmp_path):
    page = (ROOT / "docs" / "performance.md").read_text()
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {"covey", "tests", "demo", "lora_covey", "rollout", "rollout_7b", "learner"} <= set(results)
    assert (ROOT / "docs" / "performance.md").read_text() == page


def test_output_layers_are_compared_where_there_is_no_gpu(benchmarks):
    _, heads = benchmarks
    if torch.cuda.is_available():
        pytest.skip("the libraries beside it run on a GPU only")
    given = argparse.Namespace(tokens=70, width=16, vocabulary=300, repeats=1)
    found = heads.run(given, torch.device("cpu"))
    assert max(max(result["errors"]) for result in found.values()) < 0.02


def test_the_profile_names_the_kernels_around_the_time_without_one(benchmarks):
    import gpu_step

    spans = [(0.0, 10.0, "a"), (12.0, 20.0, "b"), (15.0, 60.0, "long"), (50.0, 55.0, "within"), (160.0, 170.0, "a")]
    whole, line = gpu_step.idle([*spans, (180.0, 190.0, "b"), (200.0, 210.0, "a"), (230.0, 240.0, "b")])[:2]
    assert whole == "-- idle: 0.000 s in 4 gaps of more than 5.0 us"
    assert line.split() == ["0.1", "ms", "1", "x", "long", "->", "a"]
