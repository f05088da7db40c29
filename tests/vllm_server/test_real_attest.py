"""`covey attest` against real servers, with the cases of `benchmarks/attest.py`: planted faults are refused, and honest servers are not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded():
    spec = importlib.util.spec_from_file_location("attest_benchmark", ROOT / "benchmarks" / "attest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark = loaded()
CASES = [pytest.param(name, marks=pytest.mark.vllm) for name in ("vLLM, float32", "vLLM, bfloat16")]
CASES += [pytest.param(name, marks=pytest.mark.slow) for name in ("covey serve, bfloat16", "covey serve, adapters")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return benchmark.Folders(tmp_path_factory.mktemp("folders"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_planted_faults_are_refused_and_honest_servers_are_not(name, folders):
    wrong, codes = [], set()
    for trial, found in benchmark.measure(name, folders):
        line = benchmark.row(name, trial, found)
        print(line)  # noqa: T201 - figures for the page
        codes.add(trial.code)
        wrong += [line] * (found["code"] != trial.code)
    assert not wrong, "\n".join(wrong)
    assert codes >= {benchmark.ATTESTED, benchmark.REFUSED}
