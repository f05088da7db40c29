"""Servers of judges, teachers and members are looked for before a model is loaded."""

import re
import socket
from http.server import BaseHTTPRequestHandler

import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.errors import ConfigError, ModelError, ServerError
from covey.files.places import refuse_missing
from covey.process import addresses
from covey.rewards import JudgeReward
from covey.rewards.builtin.chat_endpoint import expect_server
from kit import http_server

SMALL: dict = {"num_generations": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False}
ROWS = Dataset.from_list([{"prompt": "a"}] * 4)


@pytest.fixture
def closed():
    """An address at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.mark.parametrize("role", ["judge", "teacher", "ensemble member q"])
def test_a_server_that_is_not_there_is_named_before_the_model_is_looked_for(role, closed, tmp_path, caplog):
    args = GRPOConfig(str(tmp_path), server_timeout=0.6, **SMALL)
    more = {
        "judge": {"reward_funcs": JudgeReward(closed, "m")},
        "teacher": {"algorithm": alg.grpo().replace(regularizers=alg.distill(closed, served_model_name="m", top_k=2))},
        "ensemble member q": {"ensemble": [f"{closed},served_model_name=q"]},
    }[role]
    options = {"reward_funcs": "length", "args": args, "train_dataset": ROWS, **more}
    with pytest.raises(
        ServerError, match=rf"The {role} at {closed} cannot be reached within server_timeout=0.6 s.*refused.*: start"
    ):
        GRPOTrainer(model=str(tmp_path / "nowhere"), **options)
    assert (
        f"No {role} answers at {closed} yet; waiting up to 0.6 seconds (server_timeout). Ctrl+C ends the wait."
        in caplog.messages
    )


def test_a_teacher_that_may_be_away_may_come_later(closed, tmp_path):
    args = GRPOConfig(str(tmp_path), **SMALL)
    term = alg.distill(closed, served_model_name="m", top_k=2, when_lost="skip")
    with pytest.raises(ModelError, match="nowhere"):
        GRPOTrainer(str(tmp_path / "nowhere"), "length", args, ROWS, algorithm=alg.grpo().replace(regularizers=term))


def server(routes, starting=0, status=503):
    """A server of these routes, whose first `starting` answers are `status`; 0 cuts the connection, as a container's port does."""
    left = iter([status] * starting)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status = next(left, None)
            if status == 0:
                return self.connection.close()
            self.send_response(status or routes.get(self.path, 404))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    return http_server(Handler)


def test_an_address_of_another_path_is_told_what_to_write():
    with server({"/v1/models": 200}) as address:
        for url in (address, f"{address}/", f"{address}/v2", f"{address}/v1/chat/completions"):
            with pytest.raises(ConfigError, match=f"The judge at {url} has its API .*: write {address}/v1\\."):
                expect_server(url, "judge", 60.0)
        for url in (f"{address}/v1", f"{address}/v1/"):
            expect_server(url, "judge", 0.0)
    for routes in ({"/models": 401}, {}):  # a key, no list of models
        with server(routes) as address:
            expect_server(address, "judge", 0.0)


@pytest.mark.parametrize("status", [503, 502, 0])
def test_a_server_that_starts_with_the_run_is_waited_for(status, caplog):
    with server({"/v1/models": 200}, 1, status) as address:
        expect_server(f"{address}/v1", "teacher", 60.0)
    assert any(f"No teacher answers at {address}/v1 yet; waiting up to 60 seconds" in one for one in caplog.messages)
    with server({}, 99) as address, pytest.raises(ServerError, match="cannot be reached .HTTP 503.: start its server"):
        expect_server(address, "teacher", 0.0)


def test_a_long_wait_says_again_what_is_waited_for_and_how_long(closed, caplog, monkeypatch):
    with pytest.raises(ServerError, match="refused"):
        expect_server(closed, "judge", 0.8)
    assert len(caplog.messages) == 1
    monkeypatch.setattr(addresses, "_WORD_SECONDS", 0.1)
    with pytest.raises(ServerError, match="refused"):
        expect_server(closed, "judge", 1.2)
    again = re.compile(
        rf"No judge answers at {closed} yet; [01] seconds are left .server_timeout.. Ctrl.C ends the wait."
    )
    assert [bool(again.fullmatch(one)) for one in caplog.messages[1:]].count(True) == len(caplog.messages) - 2 > 0


@pytest.mark.parametrize("url", ["http://no-such-host.invalid/v1", "https://{address}/v1"])
def test_an_address_that_waiting_cannot_mend_is_refused_at_once(url, caplog):
    with server({}) as address, pytest.raises(ServerError, match="The judge at .* cannot be reached \\("):
        expect_server(url.format(address=address.removeprefix("http://")), "judge", 600.0)
    assert not caplog.messages


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "http://", "ftp://a/v1", "http://a:port/v1", "http://a:99999/v1", ""]
)
def test_what_is_no_address_is_refused_when_it_is_named(url):
    with pytest.raises(ConfigError, match="give an address such as http://localhost:8000/v1"):
        JudgeReward(url, "m")


def test_an_address_without_a_scheme_that_is_taken_for_a_folder_is_told_so():
    with pytest.raises(ModelError, match="The address of a server begins with http://"):
        refuse_missing("localhost:8000/v1", "model folder")
