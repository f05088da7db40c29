"""A vLLM server that takes no request now, that a proxy stands before, or that has sampling options of its own."""

from __future__ import annotations

import pytest
from fake_server import FakeServer

from covey.errors import ConfigError, ServerError
from covey.rollout import SamplingParams
from covey.rollout.vllm import Address, Client, Server, ServerSampler, refuse_unfit
from kit import tiny_model, tiny_tokenizer

PROMPTS = ["Tom has 3 apples.", "2 + 2 ="]


@pytest.fixture
def fake():
    with FakeServer(tiny_model("qwen2", tie_word_embeddings=False), tiny_tokenizer()) as server:
        yield server


@pytest.fixture
def sampler(fake, tmp_path):
    patient = {"deadlines": dict.fromkeys(("connect", "read"), 30.0), "timeout": 60.0}
    return ServerSampler(fake.replicas[0], fake.tokenizer, eos_ids=[2], port=fake.port, directory=tmp_path, **patient)


def drawn(sampler):
    groups = list(sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=4, temperature=0.0)))
    assert sorted(group.prompt.text for group in groups) == sorted(PROMPTS)


def completions(fake, fault):
    """`fault(body)` of requests of completions, and of no probe; the requests that come."""
    bodies = []

    def answer(body):
        if "prompt_logprobs" not in body:
            bodies.append(body)
            return fault(body)

    fake.faults["/v1/completions"] = answer
    return bodies


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_and_sent_no_weights(fake, sampler, caplog, status):
    drawn(sampler)
    failures = iter([status])
    bodies = completions(fake, lambda body: next(failures, None))
    drawn(sampler)
    assert len(bodies) == len(PROMPTS) + 1
    assert fake.calls.count("reload_weights") == 1
    (line,) = [line for line in caplog.messages if "asked again" in line]
    assert f"answers HTTP {status}: told to fail It is asked again until it takes the request." in line


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_proxy_before_a_server_that_was_lost_is_no_end_of_the_run(fake, sampler, status):
    drawn(sampler)
    failures = iter([status])
    completions(fake, lambda body: next(failures, None))
    drawn(sampler)
    assert fake.calls.count("reload_weights") == 2, "it may have been started again"


def test_a_busy_server_that_was_started_again_is_sent_its_weights_before_it_is_asked(fake, sampler):
    drawn(sampler)

    def started_again(body):
        if fake.version.startswith("run-") and fake.calls.count("reload_weights") == 1:
            fake.version = "default"
            return 503

    completions(fake, started_again)
    drawn(sampler)
    assert fake.calls.count("reload_weights") == 2


def test_a_request_that_the_server_refuses_ends_the_run(fake, sampler):
    drawn(sampler)
    completions(fake, lambda body: 400)
    with pytest.raises(ServerError, match="HTTP 400: told to fail"):
        drawn(sampler)


def test_a_server_that_ends_completions_early_is_named(fake, sampler):
    """As vLLM does by `max_new_tokens` of its own generation configuration: they would count as truncated."""
    completions(fake, lambda body: body.update(max_tokens=3))
    with pytest.raises(
        ServerError, match="ends completions after 3 of 4 tokens; start it with --generation-config vllm"
    ):
        drawn(sampler)


def test_requests_leave_nothing_to_the_servers_own_options_or_to_its_cache_of_other_weights(fake, sampler):
    bodies = completions(fake, lambda body: None)
    for version in (1, 2):
        sampler.load(fake.replicas[0], version)
        drawn(sampler)
    assert all(body["presence_penalty"] == body["frequency_penalty"] == 0 for body in bodies)
    assert [body["cache_salt"].rsplit(":")[1] for body in bodies] == ["1", "1", "2", "2"]


def test_a_stop_string_that_the_servers_tokenizer_reads_otherwise_is_refused(fake):
    """A token added to the run's tokenizer, in a row that the model had left: the server would write on behind it."""
    tokenizer, config = tiny_tokenizer(), fake.replicas[0].config
    tokenizer.add_tokens(["<end_of_thought>"])
    server = Server.connect(Client(Address.of(None, "127.0.0.1", fake.port)), 30.0)
    look = lambda stop: refuse_unfit(
        server, config, tokenizer, SamplingParams(stop=stop), "auto", is_on_cuda=False, has_adapter=False
    )
    look("4")
    with pytest.raises(ConfigError, match="has another vocabulary: .* reads .*<end_of_thought>"):
        look("<end_of_thought>")


def test_a_store_of_keys_and_values_of_other_weights_is_refused(fake, monkeypatch):
    client, config = Client(Address.of(None, "127.0.0.1", fake.port)), fake._config()
    store = {"kv_connector": "OffloadingConnector"}
    monkeypatch.setattr(fake, "_config", lambda: {**config, "kv_transfer_config": store})
    Server.connect(client, 30.0)
    store["kv_connector"] = "ExampleConnector"
    with pytest.raises(ConfigError, match="reads keys and values from ExampleConnector.* without --kv-transfer-config"):
        Server.connect(client, 30.0)
