"""Every pair of features, and the triples that matter: a tiny run that ends, or the sentence of the table."""

from __future__ import annotations

import re
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from combinations.combined_run import moved, policy, run, seeing, trainer
from combinations.pairs import ELSEWHERE, PAIRS, REAL, TRIPLES, Room, case_of, num_processes, write_others
from covey import GRPOConfig
from covey.config.combinations import AXES, FEATURES, REFUSALS, expect_together, refusal_of
from covey.errors import ConfigError, CoveyError
from covey.training.agents import Agents
from covey.training.build import ensemble_of
from environments.acting import chat_tokenizer, tiny_llama
from kit import tiny_tokenizer
from modalities.acting_models import acting_model
from teacher_server import serving
from vllm_server.fake_server import FakeServer

COMBINATIONS = [*PAIRS, *TRIPLES]
RUN = [one for one in COMBINATIONS if refusal_of(one) is None and not ELSEWHERE.keys() & set(one)]
REFUSED = [one for one in COMBINATIONS if refusal_of(one) is not None]
named = " + ".join


def started(stack: ExitStack, features: tuple[str, ...], folder: Path) -> dict:
    """The case, and the servers that it talks to."""
    url = None
    if "served teacher" in features:
        tokenizer = (
            chat_tokenizer() if {"tools", "environment", "agent", "rollout_func"} & set(features) else tiny_tokenizer()
        )
        teacher = policy() if tokenizer.vocab_size > 300 else tiny_llama(tokenizer)
        url, _ = stack.enter_context(serving(teacher, tokenizer))
    write_others(features, folder)
    case = {**case_of(features, url), "others": str(folder)}
    if "vLLM server" in features:
        model, tokenizer = policy(), tiny_tokenizer()
        if "chat" in case:
            model, tokenizer = tiny_llama(chat_tokenizer()), chat_tokenizer()
        if "media" in features:
            model, processor = (acting_model if "chat" in case else seeing)(case["vlm"])
            tokenizer = processor.tokenizer
        fake = stack.enter_context(FakeServer(model, tokenizer, has_digest=True))
        fake.is_varied = True
        case["options"]["vllm_server_port"] = fake.port
    return case


@pytest.mark.nightly
@pytest.mark.parametrize("features", RUN, ids=named)
def test_a_combination_that_is_not_refused_trains(features, tmp_path):
    with ExitStack() as stack:
        run(tmp_path / "run", num_processes(features), **started(stack, features, tmp_path))
    assert moved(tmp_path / "run") > 0


def test_every_feature_is_in_a_pair_that_runs_or_has_a_reason():
    assert {feature for one in RUN for feature in one} | ELSEWHERE.keys() == FEATURES.keys()
    assert all(set(pair) <= FEATURES.keys() and len(pair) == 2 for pair in REAL)
    assert all(set(axis) <= FEATURES.keys() for axis in AXES)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: named(one.terms))
def test_a_refusal_is_one_sentence_that_says_what_to_do(refusal):
    words = dict.fromkeys(re.findall(r"\{(\w+)", refusal.why), "a word of the run")
    for features in product(*refusal.choices):
        with pytest.raises(ConfigError) as raised:
            expect_together(*features, **words)
        for feature in features:  # without any one of them it runs
            expect_together(*(name for name in features if name != feature), **words)
    assert str(raised.value).endswith(".")
    assert "{" not in str(raised.value)
    assert re.search(r"\b(leave|load it here|use|take|set|give|start)\b", refusal.why, re.IGNORECASE)


IN_ONE_PROCESS = [
    one
    for one in REFUSED
    if num_processes(one) == 1
    and "media" not in one
    and not ELSEWHERE.keys() & set(one)
    and "served teacher" not in one
]


@pytest.mark.parametrize("features", IN_ONE_PROCESS, ids=named)
def test_the_trainer_refuses_by_the_table(features, tmp_path):
    refusal = refusal_of(features)
    with ExitStack() as stack, pytest.raises(CoveyError) as raised:
        trainer(tmp_path, started(stack, features, tmp_path)).train()
    assert refusal.why in str(raised.value)


def test_members_that_act_ahead_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    args = GRPOConfig(str(tmp_path), async_rollouts=True, report_to="none", use_cpu=True)
    agents = Agents.of(None, Room, None)
    assert ensemble_of(["a"], agents, args).members
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    with pytest.raises(ConfigError, match="members of an ensemble act on every process"):
        ensemble_of(["a"], agents, args)
    assert ensemble_of(None, agents, args) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "features", [one for one in REFUSED if num_processes(one) == 2 and not ELSEWHERE.keys() & set(one)], ids=named
)
def test_two_processes_are_refused_by_the_table(features, tmp_path: Path):
    refusal = refusal_of(features)
    with ExitStack() as stack, pytest.raises(AssertionError) as raised:
        run(tmp_path / "run", 2, **started(stack, features, tmp_path))
    assert refusal.why in str(raised.value)
