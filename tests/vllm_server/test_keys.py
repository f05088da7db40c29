"""The key of a server: sent with every request, asked for in one sentence, and needed by every path that changes the server."""

from __future__ import annotations

import asyncio
import socket

import psutil
import pytest
import torch
from fake_server import FakeServer, nudged

from covey.cli import main
from covey.errors import ConfigError, ServerError
from covey.process.link.covey_link import store_at
from covey.rollout import SamplingParams
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.client import Address, Client
from covey.rollout.vllm.serving import serve_command
from covey.rollout.vllm.worker.covey_media import KEY, Media
from kit import tiny_model, tiny_tokenizer


@pytest.fixture
def model():
    return tiny_model("qwen2", tie_word_embeddings=False)


@pytest.fixture
def guarded(model):
    with FakeServer(model, tiny_tokenizer()) as fake:
        fake.key = "key-of-this-server"
        yield fake


def test_a_run_with_the_key_of_the_environment_updates_the_server(guarded, model, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, guarded.key)
    sampler = ServerSampler(model, tiny_tokenizer(), port=guarded.port, directory=tmp_path, eos_ids=[2])
    nudged(model)
    sampler.load(model, version=1)
    (group,) = sampler.sample(["2 + 2 ="], 2, SamplingParams(max_tokens=4))
    assert group.size == 2
    served = guarded.replicas[0].state_dict()
    assert all(torch.equal(weight, served[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (None, f"wants an API key: put it into the environment variable {KEY}."),
        ("another-key", f"wants another API key than the one in the environment variable {KEY}."),
    ],
)
def test_without_the_key_one_sentence_says_where_it_belongs(key, sentence, guarded, model, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, key) if key else monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ServerError) as raised:
        ServerSampler(model, tiny_tokenizer(), port=guarded.port, directory=tmp_path)
    assert str(raised.value).endswith(sentence)
    assert "another-key" not in str(raised.value)
    assert guarded.calls == ["/health", "/openapi.json"]
    assert "another-key" not in repr(Client(Address.of(None)))


@pytest.mark.parametrize("key", ["another-key\n", "another-key\u20ac"])
def test_a_key_that_no_request_can_carry_is_refused_without_being_shown(key, monkeypatch):
    monkeypatch.setenv(KEY, key)
    with pytest.raises(ConfigError, match=f"the API key of the environment variable {KEY} has a line break") as raised:
        Client(Address.of(None))
    assert "another-key" not in str(raised.value)


def test_attest_names_its_own_option(guarded, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(KEY, guarded.key)  # of another server, for all that attest knows
    assert main(["attest", f"http://127.0.0.1:{guarded.port}", "--model", "demo"]) != 0
    assert "wants an API key: put it into the environment variable that --api-key-env names" in capsys.readouterr().err
    guarded.tokenizer = tiny_tokenizer()
    monkeypatch.setenv("ITS_KEY", "wrong")
    assert main(["attest", f"http://127.0.0.1:{guarded.port}", "--model", "demo", "--api-key-env", "ITS_KEY"]) != 0
    assert "another API key than the one in the environment variable ITS_KEY" in capsys.readouterr().err


def asked(path: str, key: str | None) -> int:
    """Status of a request to the middleware before an application that answers 200 to everything."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}
    asyncio.run(Media(app)(scope, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize("path", ["/collective_rpc", "/pause", "/update_weight_version", "/covey/media", "/v1/models"])
def test_every_path_that_changes_the_server_needs_the_key(path, monkeypatch):
    monkeypatch.setenv(KEY, "right")
    assert [asked(path, key) for key in (None, "wrong", "", "right")] == [401, 401, 401, 200]
    assert asked("/health", None) == 200
    monkeypatch.delenv(KEY)
    assert asked(path, None) == 200


@pytest.mark.parametrize("more", [["--api-key", "x"], ["--api-key=x"]])
def test_a_key_on_the_command_line_is_refused(more):
    with pytest.raises(ConfigError, match=f"list of processes; export {KEY}="):
        serve_command("demo", more=more)


def test_the_store_of_a_broadcast_listens_at_its_address_alone():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = store_at("127.0.0.1", port, size=2, seconds=5, is_master=True)
    store.set("name", "value")
    assert store_at("127.0.0.1", port, size=2, seconds=5).get("name") == b"value"
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    with pytest.raises(OSError, match="in use"):
        store_at("127.0.0.1", port, size=2, seconds=5, is_master=True)
