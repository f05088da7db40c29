"""Two runs at once on one machine, over real vLLM: each with a server of its own, and both with the same one by mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from real_server import Running, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
FLOAT = 1e-4
"""Nats between two computations in float32; measured: at most 1.5e-5."""


class Run:
    """A short run of the demo in a process of its own."""

    def __init__(self, folder, port: int, **options) -> None:
        self.folder = folder
        folder.mkdir()
        options = {
            **{"model": "demo", "dataset": "demo", "reward": "demo", "use_vllm": True, "vllm_mode": "server"},
            **{"output_dir": str(folder / "run"), "num_generations": 4, "per_device_train_batch_size": 16},
            **{"max_completion_length": 16, "learning_rate": 1e-4, "save_strategy": "no", "logging_steps": 1},
            **{"report_to": "none", "vllm_server_port": port, "max_steps": 6, "seed": port, **options},
        }
        (folder / "run.yaml").write_text(json.dumps(options))
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", "covey", "train", "--config", str(folder / "run.yaml")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> int:
        return self.process.wait(600)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def steps(self) -> list[dict[str, float]]:
        file = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def expect_own_weights(self) -> None:
        """Drawn with this run's weights in every step that had something to learn from."""
        name = "sampling/sampling_logp_difference/max"
        differences = [step[name] for step in self.steps() if name in step]
        assert max(differences, default=0.0) < FLOAT
        assert differences or len(self.steps()) < 3, "a run has something to learn from"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    second = Running(tmp_path_factory.mktemp("other"))
    yield second
    second.stop()


def test_two_runs_at_once_send_their_weights_by_gloo_each_to_its_own_server(running, other, tmp_path):
    runs = [
        Run(tmp_path / name, server.port, vllm_transport="gloo", vllm_group_port=free_port())
        for name, server in (("first", running), ("second", other))
    ]
    assert [run.wait() for run in runs] == [0, 0], [run.log[-2000:] for run in runs]
    for run in runs:
        assert len(run.steps()) == 6
        assert all(step["vllm/exact"] == 1 for step in run.steps()[1:])
        run.expect_own_weights()


def test_two_runs_with_the_same_group_port_the_later_one_is_told_to_give_another(running, other, tmp_path):
    group_port = free_port()
    first = Run(tmp_path / "first", running.port, vllm_transport="gloo", vllm_group_port=group_port, max_steps=200)
    try:
        while not (tmp_path / "first" / "run" / "metrics.jsonl").exists():
            assert first.process.poll() is None, first.log[-2000:]
            time.sleep(0.2)
        second = Run(tmp_path / "second", other.port, vllm_transport="gloo", vllm_group_port=group_port)
        assert second.wait() not in (0, None)
        assert f"port {group_port} of 127.0.0.1" in second.log
        assert "give another vllm_group_port" in second.log
        assert "Traceback" not in second.log
    finally:
        first.process.kill()
        first.wait()


@pytest.mark.parametrize("transport", ["directory", "gloo"])
def test_of_two_runs_with_one_server_one_ends_in_a_sentence_and_none_trains_on_the_others_draws(
    transport, running, tmp_path
):
    options = {"vllm_transport": transport, "max_steps": 12}
    runs = [
        Run(tmp_path / name, running.port, vllm_group_port=free_port(), **options, seed=seed)
        for seed, name in enumerate(("first", "second"))
    ]
    codes = [run.wait() for run in runs]
    assert any(codes), "both ended well"
    for code, run in zip(codes, runs, strict=True):
        assert len(run.steps()) == 12 if code == 0 else "give every run a server of its own" in run.log.lower()
        run.expect_own_weights()
