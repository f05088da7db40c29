"""Sleep as one state machine, and the command that starts a server."""

from __future__ import annotations

import socket
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from covey.cli import main
from covey.errors import ConfigError, ServerError
from covey.rollout.vllm import VLLMSampler, serving
from covey.rollout.vllm.client import Address, Client
from covey.rollout.vllm.lifecycle import Sleep
from covey.rollout.vllm.server import Server, warn_if_exposed
from covey.rollout.vllm.serving import serve_command
from expert_models import expert_model


class Engine:
    """Notes what vLLM's engine would be told."""

    def __init__(self):
        self.told = []

    def sleep(self, level):
        self.told.append(f"sleep {level}")

    def wake_up(self, tags):
        self.told.extend(f"wake {tag}" for tag in tags)


def test_level_2_wakes_its_weights_then_is_sent_them_then_wakes_its_cache():
    engine = Engine()
    sleep = Sleep(engine)
    sleep.sleep(2)
    sleep.sync(lambda: engine.told.append("weights sent"))
    assert engine.told == ["sleep 2", "wake weights", "weights sent", "wake kv_cache"]
    assert sleep.state == "awake"


def test_level_2_does_not_wake_without_weights():
    sleep = Sleep(Engine())
    sleep.sleep(2)
    with pytest.raises(ServerError, match=r"asleep\(2\): level-2 sleep dropped its weights, so they must be sent"):
        sleep.wake()
    assert sleep.state == "asleep(2)"


def test_level_1_wakes_as_it_fell_asleep():
    engine = Engine()
    sleep = Sleep(engine)
    sleep.sleep(1)
    sleep.wake()
    assert engine.told == ["sleep 1", "wake weights", "wake kv_cache"]


def test_a_sync_that_broke_can_be_begun_again_and_nothing_else_can():
    engine = Engine()
    sleep = Sleep(engine)
    sleep.sleep(2)

    def broken():
        raise RuntimeError("half of it")

    with pytest.raises(RuntimeError, match="half of it"):
        sleep.sync(broken)
    with pytest.raises(ServerError, match="weights are back"):
        sleep.wake()
    sleep.sync(lambda: None)
    assert sleep.state == "awake"


def test_awake_it_is_sent_weights_and_told_nothing():
    engine = Engine()
    sleep = Sleep(engine)
    sleep.sync(lambda: engine.told.append("weights sent"))
    sleep.wake()
    assert engine.told == ["weights sent"]


def test_a_sampler_that_slept_is_sent_its_weights_again_without_a_new_load():
    """Turns of tools, dynamic sampling and an evaluation draw several times between two updates."""
    engine = Engine()
    sampler = object.__new__(VLLMSampler)  # whose engine would need vLLM
    vars(sampler).update(sleep=Sleep(engine), sleeps=True, _send=lambda policy: engine.told.append(policy))
    for policy in ("weights 1", None, "weights 2"):
        if policy is not None:
            sampler.load(policy, version=1)
        sampler._settle()
        sampler.sleep.sleep(2)
    again = ["wake weights", "weights 1", "wake kv_cache", "sleep 2"]
    assert engine.told == ["weights 1", "sleep 2", *again, "wake weights", "weights 2", "wake kv_cache", "sleep 2"]


def test_a_server_in_development_mode_is_not_opened_to_the_network_by_accident():
    with pytest.raises(ConfigError, match="--host 0.0.0.0 opens a server in development mode to the network"):
        serve_command("demo", host="0.0.0.0")


@pytest.mark.parametrize(("host", "is_open"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_local_server_that_the_network_reaches_is_warned_of(host, is_open, caplog):
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen()
        address = Address.of(None, "127.0.0.1", listening.getsockname()[1])
        warn_if_exposed(Server(Client(address), None))
    assert ("listens on all interfaces: anyone on the network can replace its weights" in caplog.text) == is_open


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be used"):
            serve_command("demo", port=taken.getsockname()[1])


def test_a_model_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no folder here and no hub id"):
        serve_command("no/such/folder", port=58123)


def test_a_python_without_vllm_is_refused(capsys):
    assert main(["serve-vllm", "demo", "--port", "58123", "--python", sys.executable]) == 2
    assert "has no vLLM; pip install vllm" in capsys.readouterr().err


def test_a_python_that_does_not_answer_is_named_in_a_sentence(tmp_path, monkeypatch):
    busy = tmp_path / "python"
    busy.write_text("#!/bin/sh\nexec sleep 20\n")
    busy.chmod(0o755)
    monkeypatch.setattr(serving, "_ASK_SECONDS", 0.1)
    with pytest.raises(ConfigError) as refused:
        serve_command("demo", port=58123, python=str(busy))
    assert str(refused.value) == f"{busy} did not say within 0.1 seconds whether it has vLLM."


def test_the_command_has_what_updates_need(tmp_path, capsys):
    """With a python that answers as one with vLLM would."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho serve cuda\n")
    python.chmod(0o755)
    words = [
        "serve-vllm",
        "demo",
        "--port",
        "58123",
        "--python",
        str(python),
        "--lora-rank",
        "8",
        "--dry-run",
        "--",
        "--dtype",
        "half",
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    for needed in (
        "VLLM_SERVER_DEV_MODE=1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        "-m vllm.entrypoints.cli.main serve",
        "--host 127.0.0.1",
        "--worker-extension-cls covey_worker.CoveyWorker",
        "--enable-lora --max-lora-rank 8",
    ):
        assert needed in said
    assert said.strip().endswith("--dtype half")


@pytest.mark.parametrize("device", ["cuda", "other"])
def test_adapters_of_a_model_with_experts_are_refused_where_vllm_would_end_at_the_first_prompt(device, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho serve {device}\n")
    python.chmod(0o755)
    expert_model("GraniteMoe").save_pretrained(tmp_path / "model")
    serves = partial(serve_command, str(tmp_path / "model"), port=58123, python=str(python))
    assert "--enable-lora" not in serves()[0]
    with nullcontext() if device == "cuda" else pytest.raises(ConfigError, match="vLLM would end at the first prompt"):
        assert "--enable-lora" in serves(lora_rank=8)[0]


@pytest.mark.slow
def test_an_evaluation_after_a_run_samples_with_the_best_weights_that_it_ends_with(tmp_path):
    from datasets import Dataset
    from fake_server import FakeServer

    from covey import GRPOConfig, GRPOTrainer
    from kit import tiny_model, tiny_tokenizer

    def reward(completions, trainer_state, **columns):
        return [i % 2 - trainer_state.global_step for i in range(len(completions))]  # the first evaluation is the best

    model, rows = (
        tiny_model("qwen2", tie_word_embeddings=False),
        Dataset.from_list([{"prompt": f"{i} + {i} ="} for i in range(8)]),
    )
    with FakeServer(model, tiny_tokenizer()) as fake:
        fake.is_varied = True
        args = GRPOConfig(
            str(tmp_path), use_vllm=True, vllm_mode="server", vllm_server_port=fake.port, max_steps=3, num_generations=2, use_cpu=True,
            per_device_train_batch_size=4, per_device_eval_batch_size=4, max_completion_length=4, learning_rate=0.1, optim="sgd",
            max_grad_norm=0.0, eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True, bf16=False,
            metric_for_best_model="eval_reward", report_to="none", disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = GRPOTrainer(model, reward, args, rows, rows.select(range(2)), processing_class=tiny_tokenizer())
        trainer.train()
        assert trainer.state.best_global_step == 1
        last = {name: weight.clone() for name, weight in fake.replicas[0].state_dict().items()}
        trainer.evaluate()
        served = fake.replicas[0].state_dict()
        for name, weight in trainer.model.state_dict().items():
            torch.testing.assert_close(weight, served[name], atol=0, rtol=0)
        assert any(not torch.equal(last[name], weight) for name, weight in served.items())
