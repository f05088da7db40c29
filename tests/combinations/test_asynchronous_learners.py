"""Asynchronous rollouts of a vLLM server and of several learner processes: the run of one process, with the same staleness."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from combinations.combined_run import apart, moved, policy, run
from kit import rest_nightly, tiny_tokenizer
from vllm_server.fake_server import FakeServer

ACTING = ("environment", "agent", "tools")
AHEAD = {"async_rollouts": True, "in_flight_weights": False}
LATE = {"covey.rollout.remote:RemoteSampler.begin": 0.5, "covey.rollout.vllm.ahead:ServedWeights.begin": 0.5}
"""The learner is a step ahead by the time that a rollout begins."""


def served(folder: Path, processes: int = 1, late: Mapping[str, float] | None = None, **options):
    with FakeServer(policy(), tiny_tokenizer()) as fake:
        fake.is_varied = True
        server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": fake.port}
        return run(folder, processes, options={**server, **options}, late=late or {})


@pytest.mark.nightly
def test_a_server_without_staleness_gives_the_synchronous_run(tmp_path):
    served(tmp_path / "sync")
    logs = served(tmp_path / "ahead", **AHEAD, max_staleness=0)
    assert apart(tmp_path / "sync", tmp_path / "ahead") == 0
    assert moved(tmp_path / "sync") > 1e-3
    assert [entry["vllm/moved"] for entry in logs if "vllm/moved" in entry] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", rest_nightly([{"fsdp": True}, {}], 1), ids=["fsdp2", "ddp"])
def test_a_server_writes_ahead_for_two_learners_as_for_one(sharding, tmp_path):
    logs = served(tmp_path / "1", **AHEAD)
    assert max(entry.get("staleness/max", 0) for entry in logs) == 1
    logs = served(tmp_path / "2", 2, LATE, **AHEAD, **sharding)
    assert max(entry.get("staleness/max", 0) for entry in logs) == 1
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", [{"fsdp": True}, {}], ids=["fsdp2", "ddp"])
def test_worker_processes_write_ahead_for_two_learners_as_for_one(sharding, tmp_path):
    run(tmp_path / "1", options=AHEAD)
    logs = run(tmp_path / "2", 2, options={**AHEAD, **sharding})
    assert max(entry.get("staleness/max", 0) for entry in logs) == 1
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-6


@pytest.mark.nightly
def test_tools_are_called_in_worker_processes_ahead_of_two_learners_as_of_one(tmp_path):
    """Under DDP; under FSDP2 a server and an environment's workers write ahead."""
    options = {**AHEAD, "learning_rate": 0.02, "max_completion_length": 200}
    case = {"features": ["tools"], "others": str(tmp_path), "url": None, "chat": True, "calls": True}
    alone = run(tmp_path / "1", options=options, **case)
    logs = run(tmp_path / "2", 2, options=options, **case)
    for log in (alone, logs):
        assert max(entry.get("staleness/max", 0) for entry in log) == 1
        called = [entry["tools/call_frequency"] for entry in log if "tools/call_frequency" in entry]
        assert max(called) > 0.5
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "sharding"), rest_nightly([(one, sharding) for sharding in ({"fsdp": True}, {}) for one in ACTING], 1)
)
def test_episodes_are_scored_for_two_learners_as_for_one(feature, sharding, tmp_path):
    case = {"features": [feature], "others": str(tmp_path), "url": None, "chat": True}
    alone = run(tmp_path / "1", options=AHEAD, **case)
    logs = run(tmp_path / "2", 2, options={**AHEAD, **sharding}, late=LATE, **case)
    assert max(entry.get("staleness/max", 0) for entry in logs) == 1
    name = "rewards/Room/mean" if feature == "environment" else "rewards/agent/mean" if feature == "agent" else "reward"
    means = [[entry[name] for entry in log if name in entry] for log in (alone, logs)]
    assert means[0] == pytest.approx(means[1])
    assert means[0]
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-6
