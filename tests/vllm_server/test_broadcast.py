"""Weights by a broadcast: over gloo to a server that shares no folder, chosen by a trial, and met again after a fault."""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from changed_parts import expect_the_trainers, megabytes, moved, update
from fake_server import FakeServer, nudged

from covey.errors import ConfigError, ServerError
from covey.process.link import covey_link
from covey.process.link.covey_link import Link, store_at
from covey.rollout.vllm import ServerSampler, broadcast
from covey.rollout.vllm.broadcast import Feed, local_address, together
from covey.rollout.vllm.client import Address, Client, Deadlines
from forked import Forked, free_port
from kit import rest_nightly, tiny_model, tiny_tokenizer


@pytest.fixture
def model():
    return tiny_model("qwen2", layers=2)


@pytest.fixture
def fake(model):
    with FakeServer(model, tiny_tokenizer(), has_digest=True) as server:
        yield server


def sampler_of(fake, model, tmp_path, **options):
    options = {"group_port": int(free_port()), "transport": "gloo", **options}
    sampler = ServerSampler(model, tiny_tokenizer(), port=fake.port, directory=tmp_path, eos_ids=[2], **options)
    update(sampler)
    return sampler


RECEIVER = """
import json, sys
from covey.process.link.covey_link import Link, store_at
link = Link("gloo", store_at(sys.argv[2], int(sys.argv[1]), size=2, seconds=60), rank=1, size=2, seconds=60)
print(json.dumps([[name, str(x.dtype), list(x.shape), x.float().flatten().tolist()] for name, x in link.receive()]))
"""


HAS_IPV6 = socket.has_ipv6 and Path("/proc/net/if_inet6").exists() and bool(Path("/proc/net/if_inet6").read_text())
IPV6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")


@IPV6
@pytest.mark.parametrize(
    "host, mine", [("::1", "::1"), ("0:0:0:0:0:0:0:1", "::1"), ("::", "::1"), ("0.0.0.0", "127.0.0.1")]
)
def test_a_server_is_met_in_the_family_of_its_address(host, mine):
    address = Address.of(None, host, 8000)
    assert ("[" in str(address)) == (":" in host)
    assert Address.of(str(address)) == address
    assert local_address(SimpleNamespace(client=Client(address))) == mine


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=IPV6)])
def test_two_processes_hand_over_tensors_of_every_type(host):
    import json

    messages = [
        {"odd": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16), "matrix": torch.arange(6.0).reshape(2, 3)},
        {"whole": torch.tensor([7, 8]), "scalar": torch.tensor(2.5, dtype=torch.float64), "none": torch.zeros(0, 4)},
    ]
    port = int(free_port())
    store = store_at(host, port, size=2, seconds=60, is_master=True)
    receiver = Forked("-c", RECEIVER, port, host)
    link = Link("gloo", store, rank=0, size=2, seconds=60)
    link.send(messages)
    assert receiver.wait(60) == 0, receiver.err[-2000:]
    expected = {name: weight for message in messages for name, weight in message.items()}
    received = json.loads(receiver.out)
    assert [name for name, *_ in received] == list(expected)
    for name, dtype, shape, values in received:
        weight = expected[name]
        assert (dtype, shape, values) == (str(weight.dtype), list(weight.shape), weight.float().flatten().tolist())


def test_only_what_has_changed_is_broadcast_and_no_folder_is_written(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    nudged(model)
    update(sampler, model, 1)
    expect_the_trainers(fake, model)
    moved(model, "layers.1.mlp")
    assert update(sampler, model, 2) == megabytes(model, "layers.1.mlp")
    assert update(sampler, model, 3) == 0
    expect_the_trainers(fake, model)
    assert "reload_weights" not in fake.calls
    assert not list(tmp_path.rglob("*.safetensors"))


def test_weights_that_were_prepared_do_not_follow_the_policy(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "layers.0.mlp")
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    prepared = sampler.prepare(model, 1)
    moved(model, "")
    sampler.load_prepared(prepared)
    update(sampler)
    theirs = dict(fake.replicas[0].named_parameters())
    assert all(torch.equal(weight, theirs[name]) for name, weight in before.items())


def test_weights_that_are_sent_from_a_device_are_not_copied_in_advance(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path, transport="ipc")
    sampler.sync.transport.device = (
        "cuda"  # of which the transport, that has met the workers, only asks where pieces lie
    )
    moved(model, "layers.0.mlp")
    assert update(sampler, model, 1) == megabytes(model, "")
    expect_the_trainers(fake, model)
    assert not sampler.update.shipment.pieces
    assert sampler.sync.sums, "digests have proved them"
    prepared = sampler.prepare(model, 2)  # to be sent later, while the policy changes
    assert prepared.shipment.pieces


def test_a_restarted_server_is_met_again_and_sent_everything(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "layers.0.mlp")
    update(sampler, model, 1)
    fake.restart(tiny_model("qwen2", seed=9, layers=2))
    assert update(sampler) == megabytes(model, "")
    assert fake.calls.count("covey_join") == 2
    expect_the_trainers(fake, model)


@pytest.mark.parametrize("transport", rest_nightly(["ipc", "gloo"], ["gloo"]))
def test_a_meeting_that_a_restarted_server_does_not_come_to_is_repeated(transport, fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path, transport=transport, deadlines={"init": 5})
    fake.restart(tiny_model("qwen2", seed=9, layers=2))
    failures = [503]
    fake.faults["covey_join"] = lambda body: failures.pop() if failures else None
    assert update(sampler) == megabytes(model, "")
    expect_the_trainers(fake, model)


def test_a_broadcast_that_breaks_off_is_made_good(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path, deadlines={"update": 5})
    moved(model, "layers.0.mlp")
    failures = [503]
    fake.faults["covey_receive"] = lambda body: failures.pop() if failures else None
    assert update(sampler, model, 1) == megabytes(model, "")
    expect_the_trainers(fake, model)


def without_memory(fake):
    """A server in whose machine shared memory is another."""
    fake.faults["covey_join"] = lambda body: 503 if body["kwargs"]["backend"] == "ipc" else None


def test_memory_is_taken_within_a_machine_then_a_folder_that_the_server_sees_then_gloo(fake, model, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        sampler = sampler_of(fake, model, tmp_path, transport="auto")
    assert caplog.messages[-1] == "Weights travel to the vLLM server by shared memory."
    without_memory(fake)
    sampler_of(fake, model, tmp_path, transport="auto")
    assert "by a folder that it sees (not by shared memory: meeting the server's workers by ipc failed" in caplog.text
    fake.sees_folders = False
    sampler = sampler_of(fake, model, tmp_path, transport="auto")
    assert "by gloo (not by shared memory: meeting the server's workers" in caplog.messages[-1]
    assert f"not by a folder: the server does not see {tmp_path}" in caplog.messages[-1]
    moved(model, "norm")
    assert update(sampler, model, 1) == megabytes(model, "norm")
    expect_the_trainers(fake, model)


def test_where_no_transport_works_the_sentence_has_every_reason(fake, model, tmp_path):
    fake.sees_folders = False
    fake.faults["covey_join"] = 503
    reasons = r"not by shared memory \(meeting .*not by a folder \(the server does not see .*not by gloo \(meeting the server's workers"
    with pytest.raises(ServerError, match=reasons):
        sampler_of(fake, model, tmp_path, transport="auto", deadlines={"init": 5})


def test_a_port_in_use_and_a_worker_that_does_not_come_are_one_sentence(fake, model, tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(ServerError, match="cannot be used .*give another vllm_group_port"):
            sampler_of(fake, model, tmp_path, group_port=taken.getsockname()[1])
    fake.faults["covey_join"] = "hang"
    with pytest.raises(ServerError, match=r"meeting the server's workers by gloo"):
        sampler_of(fake, model, tmp_path, deadlines={"init": 1})


def test_it_needs_the_worker_extension(model, tmp_path):
    refused = pytest.raises(ConfigError, match="'gloo' cannot be used: the server was not started by covey serve-vllm")
    with FakeServer(model, tiny_tokenizer()) as fake, refused:
        sampler_of(fake, model, tmp_path)


def test_the_first_failure_of_two_works_ends_the_wait():
    def fail():
        raise ValueError("no")

    with pytest.raises(ServerError, match="sending failed: no"):
        together([lambda: threading.Event().wait(5), fail], 5, "sending")
    assert together([lambda: 1, lambda: 2], 5, "sending") == [1, 2]


def test_of_a_closed_connection_the_servers_answer_says_why():
    closed = threading.Event()

    def send():
        closed.set()
        raise RuntimeError("Connection closed by peer")

    def ask():
        closed.wait(5)
        time.sleep(0.1)
        raise ServerError("another process has joined this server since")

    with pytest.raises(ServerError, match="sending failed: another process has joined this server since"):
        together([send, ask], 5, "sending")


def test_a_failure_ends_the_wait_while_items_are_fed_to_another_work():
    feed, released, waits = Feed(itertools.repeat(1)), threading.Event(), []

    def read_one():
        next(feed.read())
        waits.append(released.wait(20))

    def fail():
        raise ValueError("no")

    with pytest.raises(ServerError, match="sending failed: no"):
        together([read_one, fail], 60, "sending", feed)
    assert not waits
    released.set()


def test_a_store_at_which_nobody_listens_is_refused_in_a_sentence():
    port = int(free_port())
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1 port {port} cannot be reached from .*refused"):
        store_at("127.0.0.1", port, size=2, seconds=2)


@pytest.mark.parametrize("backend, part", [("gloo", "block_of"), ("ipc", "handle_of")])
def test_a_receiver_learns_that_the_sender_has_failed(backend, part, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(covey_link, part, fail)
    store, errors = store_at("127.0.0.1", 0, size=2, seconds=60, is_master=True), queue.Queue()

    def receive():
        link = Link(backend, store_at("127.0.0.1", store.port, size=2, seconds=60), rank=1, size=2, seconds=60)
        try:
            list(link.receive())
        except RuntimeError as error:
            errors.put(str(error))

    threading.Thread(target=receive, daemon=True).start()
    link = Link(backend, store, rank=0, size=2, seconds=60)
    with pytest.raises(OSError, match="No space"):
        link.send([{"weight": torch.ones(3)}])
    assert "No space left" in errors.get(timeout=20)


FOREVER = 3600


def in_threads(works):
    """Results of works that wait for each other, or their errors as text; a work that still waits after a minute has none."""
    results = {}

    def run(place, work):
        try:
            results[place] = work()
        except Exception as error:  # noqa: BLE001 - the result
            results[place] = str(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results.get(place, "still waits") for place in range(len(works))]


def ends_of(backend, size, seconds=FOREVER):
    """Each makes the link of one end, at a common store."""
    master = store_at("127.0.0.1", 0, size=size, seconds=60, is_master=True)
    client = lambda: store_at("127.0.0.1", master.port, size=size, seconds=60)
    make = lambda rank: Link(backend, client(), rank=rank, size=size, seconds=seconds)
    return master, [lambda rank=rank: make(rank) for rank in range(size)]


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
@pytest.mark.parametrize("failing", [1, 2])
def test_an_error_of_one_worker_ends_the_waits_of_the_others_with_its_sentence(backend, failing):
    master, makes = ends_of(backend, 3)
    links = in_threads(makes)

    def load(link):
        with link.failing():
            for name, _ in link.receive():
                if link.rank == failing and name == "second":
                    raise ValueError("a weight of another shape")

    messages = [{"first": torch.ones(3)}, {"second": torch.ones(3)}, {"third": torch.ones(3)}, {"last": torch.ones(3)}]
    works = [lambda: links[0].send(messages), lambda: load(links[1]), lambda: load(links[2])]
    errors = in_threads(works)
    assert ["a weight of another shape" in str(error) for error in errors] == [True] * 3, errors
    assert master.port


TWO_ENDS = """
import sys, threading, time, torch
from covey.process.link.covey_link import Link, store_at

store = store_at("127.0.0.1", 0, size=2, seconds=60, is_master=True)
make = lambda rank, store: ends.append(Link("gloo", store, rank=rank, size=2, seconds=60))
ends, client = [], store_at("127.0.0.1", store.port, size=2, seconds=60)
threads = [threading.Thread(target=make, args=pair, daemon=True) for pair in ((0, store), (1, client))]
"""
ENDINGS = {
    "a collective that has begun": """
[thread.start() for thread in threads]
[thread.join() for thread in threads]
first, second = sorted(ends, key=lambda link: link.rank)
threading.Timer(0.5, first.fail, ["no more"]).start()
try:
    list(second.receive())
except RuntimeError as error:
    second.fail(repr(error))
    sys.exit(71)
""",
    "waits for another end": """
for rank in range(20):
    threading.Thread(target=lambda rank=rank: Link("gloo", store, rank=rank, size=21, seconds=60), daemon=True).start()
time.sleep(0.1)
sys.exit(71)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", rest_nightly(ENDINGS, ["a collective that has begun"]))
def test_a_process_that_ends_within_leaves_with_its_own_exit_code(what):
    script = TWO_ENDS + ENDINGS[what]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 71, done.stderr


def test_ends_do_not_wait_for_one_that_has_failed(monkeypatch):
    master, (first, second, _) = ends_of("gloo", 3)
    monkeypatch.setattr(covey_link, "_LOOK_SECONDS", 0.02)
    store = store_at("127.0.0.1", master.port, size=3, seconds=60)
    store.set("failed", "RuntimeError('it has no memory')")
    assert in_threads([first, second]) == ["RuntimeError('it has no memory')"] * 2


def test_an_update_that_the_server_refuses_ends_the_thread_that_sends(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "layers.0.mlp")
    fake.faults["covey_receive"], before = 503, threading.enumerate()
    with pytest.raises(ServerError):
        update(sampler, model, 1)
    sending = [thread for thread in threading.enumerate() if thread.name == "covey-broadcast" and thread not in before]
    for thread in sending:
        thread.join(30)  # the limit of a collective is 60
    assert not any(thread.is_alive() for thread in sending)


def test_of_memory_within_a_machine_no_other_port_is_advised(fake, model, tmp_path, monkeypatch):
    def refuse(*place, **options):
        raise OSError("Address family not supported")

    monkeypatch.setattr(broadcast, "store_at", refuse)
    with pytest.raises(ServerError, match=r"a free port of 127\.0\.0\.1, .* cannot be used \(Address") as caught:
        sampler_of(fake, model, tmp_path, transport="ipc")
    assert "vllm_group_port" not in str(caught.value)


CALLS = {"directory": "covey_reload", "gloo": "covey_receive", "ipc": "covey_receive"}


@pytest.mark.parametrize("transport", rest_nightly(CALLS, 1))
def test_an_answer_after_its_deadline_is_not_taken_for_that_of_a_later_call(transport, fake, model, tmp_path):
    """vLLM's workers answer in order: one that its executor had given up would answer each later call with the answer before."""
    sampler = sampler_of(fake, model, tmp_path, transport=transport)
    moved(model, "layers.0.mlp")
    patient, sampler.client.deadlines = sampler.client.deadlines, Deadlines.of({"update": 0.3, "init": 0.3})
    fake.holds[CALLS[transport]] = ends = threading.Event()
    sampler.timeout = 0.3
    with pytest.raises(ServerError):
        update(sampler, model, 1)
    sampler.client.deadlines = patient
    ends.set()
    assert update(sampler) == megabytes(model, "")
    expect_the_trainers(fake, model)
    moved(model, "norm")
    assert update(sampler, model, 2) == megabytes(model, "norm")
    expect_the_trainers(fake, model)
