"""Real vLLM in the process of a run, with every feature that goes with it: drawn with the learner's weights, after updates too."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from real_server import PYTHON

from combinations.pairs import IN_PROCESS, case_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
FLOAT = 1e-4
"""Nats between two computations in float32, at heads of 32 numbers; measured: at most 1.5e-5."""
STALE = 1e-2
"""Nats that an update moves some completion by, at least: weights of before would be seen."""


def case(*features: str) -> dict:
    """A run whose steps are large, of a model whose heads vLLM takes on a CPU."""
    made = case_of(("vLLM in process", *features))
    made |= {"config": {"hidden": 64}, "llama": {"heads": 2}, "hidden": 64}
    made["options"] |= {"vllm_max_model_length": 1024 if "chat" in made else 256}
    if {"tools", "environment"} & set(features):
        made["calls"] = True
        made["options"] |= {"max_completion_length": 160, "max_steps": 3}
    if "asynchronous" in features:
        made["options"]["max_steps"] = 4  # the first two draw with the weights of the start
    if "media" in features:
        made |= {"vlm": "idefics3"}
    return made


CASES = {**{name: (name,) for name in IN_PROCESS}, "asynchronous media": ("asynchronous", "media")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results by name. One process runs all: an engine takes longer to start than a run."""
    words = [PYTHON, HERE / "in_process.py", tmp_path_factory.mktemp("runs")]
    cases = {name: case(*features) for name, features in CASES.items()}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}
    done = subprocess.run(
        [*words, json.dumps(cases)], env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(cases), done.stderr[-3000:]
    return {one["name"]: one for one in found}


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_has_the_log_probabilities_of_a_plain_forward_of_its_weights(name, results):
    found = results[name]
    assert "error" not in found, found["trace"]
    assert len(found["logs"]) == case(*CASES[name])["options"]["max_steps"]
    print(name, *(f"{key} {max(found[key], default=None)}" for key in ("gaps", "stale", "after")))  # noqa: T201 - for the page
    if name != "rollout_func":  # which writes tokens and numbers of its own
        assert max(found["gaps"]) < FLOAT
        assert max(found["stale"]) > STALE
    if "asynchronous" in CASES[name]:
        assert max(entry["staleness/max"] for entry in found["logs"]) == 1
    else:  # the engine is here
        assert max(found["after"]) < FLOAT
        assert max(found["after_stale"]) > STALE
    if {"tools", "environment"} & set(CASES[name]):
        assert found["replies"] > 0
