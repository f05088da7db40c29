"""A real vLLM server on a CPU that dies between two calls of a rollout."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from fake_server import nudged

from covey.demo import model_path
from covey.errors import ConfigError
from covey.models import load_model, load_tokenizer
from covey.rollout import SamplingParams
from covey.rollout.agreement import plain_logprobs
from covey.rollout.vllm import ServerSampler

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


def start_again(running):
    """Kill the server and start it anew, at once and in a thread, as soon as its processes have left the port."""

    def begin():
        while True:
            try:
                return running.start()
            except ConfigError:  # the port is still in use
                time.sleep(0.2)

    os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()
    threading.Thread(target=begin, daemon=True).start()
