"""Delays at the boundaries of asynchronous rollouts: a run repeats bit for bit, whichever thread or process is late."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from combinations.combined_run import policy, trainer
from delays import planted
from kit import rest_nightly, tiny_tokenizer
from vllm_server.fake_server import FakeServer

HERE = {
    "an order's thread begins": "covey.rollout.thread_worker:ThreadWorker._write",
    "an environment is reset": "covey.environments.factory:EnvironmentPool.reset",
    "a tool answers": "covey.environments.calls:ToolRunner.run",
    "an order is made": "covey.rollout.asynchronous:AsynchronousSampler.order",
    "a message is sent": "covey.rollout.worker_process:ProcessWorker.send",
    "a message is heard": "covey.rollout.worker_process:decoded",
    "weights are loaded": "covey.rollout.central:CentralSampler.load",
    "weights are published": "covey.rollout.worker_process:ProcessWorker.publish",
    "rewards are given": "covey.training.drawing:_finished",
    "the learner learns": "covey.learner.learner:Learner.step",
}
THERE = {
    "a worker starts": "covey.rollout.worker:Served.__init__",
    "a worker hears": "covey.rollout.worker:Served._receive",
    "a worker takes weights": "covey.rollout.worker:Writer._put",
    "a worker begins": "covey.rollout.worker:Served._write",
    "a worker asks": "covey.rollout.worker:Served._ask",
    "a worker answers": "covey.rollout.worker:_sendable",
}
SECONDS = 0.2
BEGINS = "an order's thread begins"
OF_EPISODES = {BEGINS, "an environment is reset", "a tool answers", "a worker asks"}
CASES = {
    "environment": {"features": ["environment"], "chat": True},
    "tools": {"features": ["tools"], "chat": True, "calls": True},
    "plain": {},
    "served": {},
}
EVENTS = [
    *(("environment", event) for event in (*HERE, *THERE) if event != BEGINS),
    *(("tools", event) for event in ("a tool answers", "a worker asks")),
    *(("plain", event) for event in (*HERE, *THERE) if event not in OF_EPISODES),
    *(("served", event) for event in ("an order is made", "weights are loaded", "the learner learns")),
]


@cache
def on_time(kind: str, folder: Path) -> list[torch.Tensor]:
    return trained(kind, folder)


def trained(kind: str, folder: Path, here: Any = None, there: Any = None) -> list[torch.Tensor]:
    """The weights of a run of rollouts ahead, one of which is written while the learner learns from another."""
    case = {"others": str(folder), "url": None, **CASES[kind]}
    options: dict[str, Any] = {"async_rollouts": True, "in_flight_weights": False, "max_steps": 4}
    with ExitStack() as stack:
        if kind == "served":
            fake = stack.enter_context(FakeServer(policy(), tiny_tokenizer()))
            fake.is_varied = True
            options |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": fake.port}
        stack.enter_context(planted(here or {}, there or {}))
        made = trainer(folder, {**case, "options": options})
        made.train()
    assert max(entry.get("staleness/max", 0) for entry in made.state.log_history) == 1
    return [weight.detach().clone() for weight in made.model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "event"), rest_nightly([("environment", BEGINS), ("served", BEGINS), *EVENTS], 2))
def test_a_run_repeats_whatever_is_late(kind, event, tmp_path, tmp_path_factory):
    expected = on_time(kind, tmp_path_factory.getbasetemp() / kind)
    here, there = ({names[event]: SECONDS} if event in names else {} for names in (HERE, THERE))
    late = trained(kind, tmp_path, here, there)
    assert max(float((one - other).abs().max()) for one, other in zip(late, expected, strict=True)) == 0
