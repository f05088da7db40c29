"""A real vLLM server on a CPU that dies between two calls of a rollout."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import peft
import psutil
import pytest
import torch
from fake_server import nudged

from covey.demo import model_path
from covey.errors import ConfigError, ServerError
from covey.models import load_model, load_tokenizer
from covey.rollout import SamplingParams
from covey.rollout.agreement import plain_logprobs
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.transports import AdapterTransport

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPTS = ["Tom has 3 apples and buys 4 more. How many apples does Tom have?", "12 + 30 ="]
FLOAT = 1e-4
"""Nats between two computations in float32; measured: at most 1.4e-5."""


def sampler_of(running, model, tmp_path, **options):
    return ServerSampler(model, load_tokenizer(None, model_path()), port=running.port, directory=tmp_path, **options)


def drawn(sampler, model, prompts=PROMPTS, n=2, most=12):
    """Largest difference of what is drawn from a plain forward of these weights."""
    groups = list(sampler.sample(prompts, n, SamplingParams(max_tokens=most)))
    assert sorted(group.prompt.uid for group in groups) == sorted(map(str, range(len(prompts))))
    assert all(len(group.completions) == n for group in groups)
    completions = [one for group in groups for one in group.completions]
    pairs = zip(completions, plain_logprobs(model, groups), strict=True)
    return max(float((one.logprobs - mine).abs().max()) for one, mine in pairs)


def test_weights_are_sent_again_to_a_server_that_dies_between_their_arrival_and_the_first_token(running, tmp_path):
    model = load_model("demo")
    sampler = sampler_of(running, model, tmp_path, timeout=600.0, transport="ipc")
    assert drawn(sampler, model) < FLOAT
    nudged(model, seed=7)
    sampler.load(model, 1)
    push = sampler.sync.push

    def dies(update):
        seen, sampler.sync.push = push(update), push
        start_again(running)
        return seen

    sampler.sync.push = dies
    assert drawn(sampler, model) < FLOAT
    assert drawn(sampler, model) < FLOAT


def test_groups_that_a_server_lost_amid_its_death_are_drawn_again_and_the_others_are_not(running, tmp_path):
    model = load_model("demo")
    sampler = sampler_of(running, model, tmp_path, timeout=600.0)
    nudged(model, seed=9)
    sampler.load(model, 1)
    answers = counted(sampler, dies=lambda: start_again(running))
    assert drawn(sampler, model, MANY, most=40) < FLOAT
    assert len(answers) == len(MANY)
    assert drawn(sampler, model) < FLOAT


@pytest.mark.parametrize("is_adapter", [False, True], ids=["whole weights", "an adapter"])
def test_a_server_that_is_started_again_between_two_samples_is_sent_the_same_weights(
    is_adapter, running, tmp_path, caplog
):
    """Its base weights stand there again, and its address answers: nothing fails by itself."""
    model = load_model("demo")
    if is_adapter:
        start_again(running).join()  # with the base, whatever the tests before left there
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    sampler = sampler_of(running, model, tmp_path, timeout=600.0)
    assert isinstance(sampler.sync.transport, AdapterTransport) == is_adapter
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    draw = torch.Generator().manual_seed(3)
    for weight in trained:
        weight.data.add_(0.05 * torch.randn(weight.shape, generator=draw))
    sampler.load(model, 1)
    assert drawn(sampler, model) < FLOAT
    start_again(running).join()
    assert drawn(sampler, model) < FLOAT
    assert "was started again, without the weights of this run" in caplog.text
    assert drawn(sampler, model) < FLOAT


def test_a_server_that_dies_amid_sampling_and_stays_away_ends_the_run_in_one_sentence(running, tmp_path):
    model = load_model("demo")
    sampler = sampler_of(running, model, tmp_path, timeout=4.0)
    counted(sampler, dies=lambda: killed(running))
    with pytest.raises(ServerError, match=r"No vLLM server answers at .* within 4 seconds .* Start one"):
        drawn(sampler, model, MANY, most=40)
    start_again(running).join()
    assert drawn(sampler, model) < FLOAT


def test_an_engine_that_dies_alone_amid_sampling_is_a_lost_server(running, tmp_path, caplog):
    """As the kernel ends the process that holds the memory: the server still answers, with HTTP 500, and then ends."""
    model = load_model("demo")
    sampler = sampler_of(running, model, tmp_path, timeout=600.0)
    nudged(model, seed=10)
    sampler.load(model, 1)
    (engine,) = (child for child in psutil.Process(running.process.pid).children() if "EngineCore" in child.name())

    def dies():
        engine.kill()
        running.process.wait(60)
        start_again(running)

    answers = counted(sampler, dies=lambda: threading.Thread(target=dies, daemon=True).start())
    assert drawn(sampler, model, MANY, most=40) < FLOAT
    assert len(answers) >= len(MANY)
    assert "answers HTTP 500: EngineCore encountered an issue" in caplog.text or "broke off" in caplog.text


def test_a_server_that_comes_back_without_the_endpoints_of_updates_ends_the_run_in_one_sentence(running, tmp_path):
    model = load_model("demo")
    sampler = sampler_of(running, model, tmp_path, timeout=600.0)
    assert drawn(sampler, model) < FLOAT
    start_again(running, VLLM_SERVER_DEV_MODE="0").join()
    with pytest.raises(ServerError, match=r"lacks .*/server_info.* start it with covey serve-vllm MODEL"):
        drawn(sampler, model)


MANY = [f"{i} + {i} =" for i in range(40)]


def counted(sampler, dies):
    """The answers that the sampler reads, one a prompt; `dies` is called at the fifth."""
    read, answers = sampler._completions, []

    def reading(*answer):
        answers.append(answer)
        if len(answers) == 5:
            dies()
        return read(*answer)

    sampler._completions = reading
    return answers


def start_again(running, **more):
    """Kill the server and start it anew, at once and in a thread, as soon as its processes have left the port."""

    def begin():
        while True:
            try:
                return running.start(**more)
            except ConfigError:  # the port is still in use
                time.sleep(0.2)

    killed(running)
    starting = threading.Thread(target=begin, daemon=True)
    starting.start()
    return starting


def killed(running):
    with contextlib.suppress(ProcessLookupError):  # killed before
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()
