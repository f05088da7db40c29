"""Routing replay over vLLM: the experts that it returns are those of a plain forward, in the learner's layers, whatever it drew."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fake_server import FakeServer, nudged
from real_server import PYTHON, Running
from recorded_experts import DENSE_FIRST, model_of, run_of, shares_in

from covey.errors import ConfigError, ServerError
from covey.kernels import expert_layers
from covey.learner.packing import unscored_row
from covey.learner.policy import Policy
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.turns import TurnSampler
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.experts import with_experts
from covey.types import Completion, Group, Prompt
from expert_models import expert_model
from kit import tiny_tokenizer

HERE = Path(__file__).parent
PROMPTS = [Prompt(uid=str(i), token_ids=tuple(range(5 + i, 6 + 6 * i))) for i in range(3)]
PARAMS = SamplingParams(max_tokens=6, seed=0)


def changed(model: Any, groups: list[Group]) -> float:
    """Share of choices that the learner's own routers would make otherwise."""
    rows = [unscored_row(group.prompt, one, i) for i, group in enumerate(groups) for one in group.completions]
    return float(Policy(model, pad_id=0, replays_experts=True).measure(rows).routing["experts/changed"])


def policy() -> Any:
    return expert_model("Qwen3Moe", vocab_size=len(tiny_tokenizer()), tie_word_embeddings=False, **DENSE_FIRST)


def over(port: int) -> dict[str, Any]:
    return {"vllm_mode": "server", "vllm_server_port": port}


@pytest.fixture
def fake():
    with FakeServer(policy(), tiny_tokenizer()) as server:
        server.returns_experts = server.is_varied = True
        yield server


def test_layers_with_experts_are_numbered_as_vllm_numbers_them():
    assert expert_layers(policy()) == (1, 2)
    assert expert_layers(expert_model("DeepseekV3")) == (1,)
    assert expert_layers(expert_model("Qwen3Moe", mlp_only_layers=[0, 1])) == ()


def test_a_servers_experts_are_the_learners_also_after_an_update(fake, tmp_path):
    model = policy()
    sampler = ServerSampler(model, tiny_tokenizer(), port=fake.port, records_experts=True, directory=tmp_path)
    for version in range(2):
        groups = list(sampler.sample(PROMPTS, 3, PARAMS))
        assert changed(model, groups) == 0.0
        for group in groups:
            for one in group.completions:
                assert one.experts is not None
                assert one.experts.shape == (one.num_tokens, 2, 2)
                assert one.prompt_experts is group.completions[0].prompt_experts, "completions share the prompt's"
        nudged(model, 0.5)
        assert changed(model, groups) > 0.0, "choices of other weights differ, so this can fail"
        sampler.load(model, version + 1)


@pytest.mark.parametrize("is_ahead", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_over_a_server_replays_its_experts(is_ahead, fake, tmp_path):
    ahead = {"async_rollouts": True, "max_staleness": 0} if is_ahead else {}
    run = run_of(policy(), tmp_path, **over(fake.port), **ahead)
    run.train()
    assert shares_in(run) == [0.0] * 3


def test_a_server_that_returns_no_experts_is_refused_with_the_flag(fake, tmp_path):
    fake.returns_experts = False
    with pytest.raises(ConfigError, match="start it with covey serve-vllm MODEL -- --enable-return-routed-experts"):
        run_of(policy(), tmp_path, **over(fake.port))


def completion(tokens: int) -> Completion:
    return Completion(token_ids=torch.arange(tokens), text="", finish="length")


@pytest.mark.parametrize(
    "table, sentence",
    [
        (None, "experts of 4 tokens and layer 2 of a completion, and vLLM returned none"),
        (numpy.arange(15).reshape(5, 3, 1), "vLLM returned those of 5 tokens and 3 layers"),
        (numpy.arange(16).reshape(4, 2, 2), "vLLM returned those of 4 tokens and 2 layers"),
        (numpy.zeros((4, 3, 2)), "vLLM returned one expert twice"),
    ],
)
def test_experts_of_other_tokens_or_layers_end_the_run(table, sentence):
    with pytest.raises(ServerError, match=sentence):
        with_experts([completion(2)], [table], Prompt(uid="", token_ids=(1, 2, 3)), (1, 2))


def test_more_than_256_experts_take_two_bytes():
    table = numpy.array([300, 2, 299, 1] * 4, numpy.uint16).reshape(4, 2, 2)
    (one,) = with_experts([completion(2)], [table], Prompt(uid="", token_ids=(1, 2, 3)), (1,))
    assert (one.experts.dtype, one.experts[0].tolist()) == (torch.int16, [[299, 1]])


@pytest.mark.parametrize("tokens", [12, 24])
def test_turns_over_a_sampler_have_the_experts_of_the_replies_too(tokens):
    """Cut within a reply too, whose last tokens no pass has read."""
    model, environment = policy(), lambda turns: [[9, 10, 11] if len(turn.token_ids) < 14 else None for turn in turns]
    sampler = NativeSampler(model, tiny_tokenizer(), records_experts=True, eos_ids=list(range(2, 40)))
    turns = TurnSampler(sampler, environment, tiny_tokenizer(), 512)
    groups = list(turns.sample(PROMPTS, 8, SamplingParams(max_tokens=tokens, seed=0)))
    ones = [one for group in groups for one in group.completions]
    assert any(not one.written[-1] for one in ones) == (tokens == 12)
    assert changed(model, groups) == 0.0
    for one in ones:
        assert len(one.experts) == int(one.written.nonzero()[-1]) + 1


# -- with vLLM ---------------------------------------------------------------------------------------------------------------

RUNNER = str(HERE / "second_runner")
FLOAT = 1e-4
"""Nats between two computations in float32; measured: at most 2e-5."""


def by_vllm(folder: Path, *paths: str) -> Any:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), *paths]),
    }
    words = [PYTHON, HERE / "recorded_experts.py", folder]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_experts_of_vllm_in_the_process_are_those_of_a_plain_forward(tmp_path):
    done = by_vllm(tmp_path, RUNNER)
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    print(results[0])  # noqa: T201 - for the page
    assert results[0].pop("run") == [0.0] * 3
    assert {name: tuple(result.pop("layers")) for name, result in results[0].items()} == {
        "Qwen3Moe": (1, 2),
        "Mixtral": (0, 1),
    }
    for result in results[0].values():
        assert len(result) == 6
        for draw in result.values():
            assert draw["changed"] == 0.0
            assert draw["gap"] < FLOAT


@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_vllm_without_triton_is_refused_in_a_sentence(tmp_path):
    done = by_vllm(tmp_path)
    assert done.returncode != 0
    assert "vLLM (0.32) returns where it has Triton, and its build for CPUs has none" in done.stderr


@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_a_run_over_a_real_server_replays_its_experts(tmp_path, monkeypatch):
    model = model_of("Qwen3Moe", **DENSE_FIRST)
    for part in (model, tiny_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", RUNNER)
    server = Running(tmp_path, str(tmp_path / "model"), None, ["--enable-return-routed-experts"])
    try:
        run = run_of(model, tmp_path / "run", **over(server.port))
        run.train()
    finally:
        server.stop()
    assert shares_in(run) == [0.0] * 3
    assert all(line["vllm/exact"] == 1.0 for line in run.state.log_history if "vllm/exact" in line)
