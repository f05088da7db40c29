"""Real vLLM with several learner processes: an engine in each, and a server that writes ahead for a model that FSDP2 splits."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from real_server import PYTHON, running  # noqa: F401 - a fixture

from covey.models import load_model
from forked import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
FLOAT = 1e-4
"""Nats between two computations in float32; measured: at most 1.5e-5."""

SCRIPT = """
import json, os, sys
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
import torch
from datasets import Dataset
from covey import GRPOConfig, GRPOTrainer
from covey.demo import model_path

torch.set_num_threads(1)
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: one
        b: other
    '''
    return a + b

case = json.loads(sys.argv[2])
if case.pop("is_stale", False):  # a fault: updates do not reach the engine
    from covey.rollout.vllm import VLLMSampler
    load = VLLMSampler.load
    VLLMSampler.load = lambda self, policy, version: load(self, policy, version) if version == 0 else None
peft = None
if case.pop("lora", False):
    from peft import LoraConfig
    peft = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
drawn = []
if case.get("vllm_mode") == "server":
    from covey.rollout.vllm import ServerSampler
    sample = ServerSampler.sample

    def recorded(self, *request):
        for group in sample(self, *request):
            drawn.extend(
                (one.version, group.prompt.token_ids, one.token_ids.tolist(), one.logprobs.tolist()) for one in group.completions
            )
            yield group

    ServerSampler.sample = recorded
args = GRPOConfig(
    sys.argv[1], use_vllm=True, max_steps=3, num_generations=2, learning_rate=1e-3, per_device_train_batch_size=2,
    max_completion_length=8, report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, logging_steps=1,
    gradient_checkpointing=False, rollout_dtype="float32", **{"save_strategy": "no", **case},
)
rows = Dataset.from_list([{"prompt": f"{i} + {i} ="} for i in range(16)])
reward = lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids]
trainer = GRPOTrainer(str(model_path()), reward, args, rows, peft_config=peft)
trainer.train()
if args.process_index == 0:
    with open("drawn.json", "w") as file:
        json.dump(drawn, file)
    print("LOG", json.dumps(trainer.state.log_history))
"""


def logs_of(folder: Path, python: str, *, processes: int = 2, **case) -> list[dict[str, float]]:
    (folder / "run.py").write_text(SCRIPT)
    group = ["--nproc_per_node", str(processes), "--master_port", str(free_port())]
    command = [python, "-m", "torch.distributed.run", *group]
    done = subprocess.run(
        [*command, "run.py", str(folder / "run"), json.dumps(case)],
        cwd=folder, capture_output=True, text=True, timeout=800, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Invalid process group" not in done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOG "))
    return [entry for entry in json.loads(line.removeprefix("LOG ")) if "loss" in entry]


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def expect_near(logs: list[dict[str, float]]) -> None:
    """What vLLM drew with has the log-probabilities of what learns, after updates too."""
    assert len(logs) == 3
    assert all(entry["sampling/sampling_logp_difference/max"] < 2e-3 for entry in logs)


def farthest(folder: Path) -> float:
    """Nats between what the server drew with and a plain forward, in one process, of the weights of that version's checkpoint."""
    apart, versions = 0.0, set()
    for version, prompt, ids, logprobs in json.loads((folder / "drawn.json").read_text()):
        with torch.no_grad():
            logits = saved_model(folder / "run" / f"checkpoint-{version}")(torch.tensor([[*prompt, *ids]])).logits[0]
        expected = logits[len(prompt) - 1 : -1].float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        apart = max(apart, float((torch.tensor(logprobs) - expected).abs().max()))
        versions.add(version)
    assert max(versions) >= 1
    return apart


KEPT = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}


@cache
def saved_model(checkpoint: Path):
    """The model of a checkpoint, adapters and all; of version 0 there is none."""
    if not checkpoint.exists():
        assert checkpoint.name == "checkpoint-0"
        return load_model("demo")
    if (checkpoint / "adapter_config.json").exists():
        return PeftModel.from_pretrained(load_model("demo"), checkpoint)
    return load_model(str(checkpoint))


@pytest.mark.parametrize("processes, ahead", [(1, False), (2, False), (2, True)], ids=["one", "split", "split, ahead"])
def test_an_adapter_of_a_model_that_is_split_travels_alone(processes, ahead, running, tmp_path):  # noqa: F811
    """Before the tests that put other whole weights beneath it."""
    case = {"vllm_mode": "server", "vllm_server_port": running.port, "fsdp": processes > 1, "async_rollouts": ahead}
    logs = logs_of(tmp_path, sys.executable, processes=processes, lora=True, **case, **KEPT)
    sent = [entry["weights/mb"] for entry in logs if "weights/mb" in entry]
    assert len(sent) >= 2
    assert max(sent) < 0.2, "the adapter alone; the model has 4.0"
    assert farthest(tmp_path) < FLOAT


@pytest.mark.parametrize("transport, ahead", [("directory", False), ("ipc", True)])
def test_the_weights_of_a_split_model_are_those_of_its_checkpoints(transport, ahead, running, tmp_path):  # noqa: F811
    case = {"vllm_mode": "server", "vllm_server_port": running.port, "fsdp": True, "async_rollouts": ahead}
    logs = logs_of(tmp_path, sys.executable, vllm_transport=transport, **case, **KEPT)
    assert all(entry["vllm/exact"] == 1 for entry in logs if "vllm/exact" in entry)
    assert farthest(tmp_path) < FLOAT


CONTEXT = {"parallelism_config": {"cp_size": 2}}


@pytest.mark.parametrize("sharding", [{"fsdp": True}, {}, CONTEXT], ids=["fsdp2", "ddp", "context parallel"])
def test_an_engine_in_each_of_two_processes_has_the_learners_weights(sharding, tmp_path):
    expect_near(logs_of(tmp_path, PYTHON, vllm_max_model_length=256, temperature=2.0, **sharding))


def test_weights_that_did_not_arrive_would_be_seen(tmp_path):
    _, *later = logs_of(tmp_path, PYTHON, vllm_max_model_length=256, temperature=2.0, is_stale=True)
    assert all(entry["sampling/sampling_logp_difference/max"] > 2e-2 for entry in later)


@pytest.mark.parametrize("sharding", [{"fsdp": True}, {}], ids=["fsdp2", "ddp"])
def test_a_servers_weights_are_broadcast_by_gloo(sharding, running, tmp_path):  # noqa: F811
    case = {"vllm_mode": "server", "vllm_server_port": running.port, "vllm_transport": "gloo", "temperature": 2.0}
    logs = logs_of(tmp_path, sys.executable, **case, **sharding, vllm_group_port=int(free_port()))
    expect_near(logs)
    assert [entry["vllm/exact"] for entry in logs[1:]] == [1, 1]
    assert all(entry["weights/mb"] > 0 for entry in logs[1:])
    assert not list(tmp_path.rglob("vllm-weights/**/*.safetensors"))


def test_a_server_writes_ahead_for_a_model_split_over_two_processes(running, tmp_path):  # noqa: F811
    case = {"vllm_mode": "server", "vllm_server_port": running.port, "fsdp": True, "async_rollouts": True}
    logs = logs_of(tmp_path, sys.executable, **case)
    assert max(entry["staleness/max"] for entry in logs) == 1
    measured = [entry for entry in logs if "vllm/exact" in entry]
    assert measured
    assert all(entry["vllm/exact"] == 1 for entry in measured)
    assert all(entry["sampling/effective_sample_size"] > 0.5 for entry in logs)
