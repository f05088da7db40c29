"""Every pair of features, and the triples that matter: a tiny run that ends, or the sentence of the table."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from combinations.combined_run import moved, policy, run, seeing, trainer
from combinations.pairs import ELSEWHERE, PAIRS, REAL, TRIPLES, case_of, num_processes, write_others
from covey.config.combinations import AXES, FEATURES, REFUSALS, expect_together, refusal_of
from covey.errors import ConfigError, CoveyError
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


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: named(sorted(one.features)))
def test_a_refusal_is_one_sentence_that_says_what_to_do(refusal):
    with pytest.raises(ConfigError) as raised:
        expect_together(*refusal.features)
    assert str(raised.value).endswith(".")
    assert "leave" in refusal.why or "load it here" in refusal.why


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "features", [one for one in REFUSED if num_processes(one) == 2 and not ELSEWHERE.keys() & set(one)], ids=named
)
def test_two_processes_are_refused_by_the_table(features, tmp_path: Path):
    refusal = refusal_of(features)
    with ExitStack() as stack, pytest.raises(AssertionError) as raised:
        run(tmp_path / "run", 2, **started(stack, features, tmp_path))
    assert refusal.why in str(raised.value)
