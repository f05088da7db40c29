"""Weights handed over as memory of one machine, to processes without vLLM: shared memory on a CPU, CUDA IPC on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch
from memory_worker import as_json, layers, started
from torch.utils._python_dispatch import TorchDispatchMode

from covey.errors import ServerError
from covey.process.link import covey_link
from covey.process.link.covey_link import Link, store_at
from covey.process.world import World
from covey.rollout.vllm.broadcast import BroadcastTransport
from covey.rollout.vllm.choice import transport_for
from covey.rollout.vllm.client import Address, Client, Deadlines
from covey.rollout.vllm.server import Server, ServerInfo
from covey.rollout.vllm.transports import DirectoryTransport
from covey.rollout.vllm.weights import Source, digests_of, texts_of
from forked import free_port
from kit import rest_nightly

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@contextmanager
def freeing(device):
    """All memory of the GPU that is taken within is free again afterwards."""
    is_on_cuda = torch.device(device).type == "cuda"
    before = torch.cuda.memory_allocated() if is_on_cuda else 0
    yield
    if is_on_cuda:
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() == before


def messages_of(seed, device):
    """An update of two mappings: a layer that is loaded in place, and tensors of every type."""
    draw = torch.Generator().manual_seed(seed)
    layer = {"weight": torch.randn(1024, 64, generator=draw), "bias": torch.randn(1024, generator=draw)}
    others = {
        "half": torch.randn(3, generator=draw).bfloat16(),
        "whole": torch.tensor([7, seed]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 4),
    }
    return [{name: value.to(device) for name, value in part.items()} for part in (layer, others)]


def hand_over(link, device, count):
    """What `count` updates hold, each of which is handed over and then overwritten."""
    expected = []
    for seed in range(count):
        messages = messages_of(seed, device)
        expected.append({name: as_json(value) for part in messages for name, value in part.items()})
        link.send(messages)
        for value in (value for part in messages for value in part.values()):
            value.fill_(77)
        torch.full((2**19,), 255, dtype=torch.uint8, device=device)  # memory that the blocks of `send` have left
    return expected


@pytest.mark.parametrize("receivers", rest_nightly([2, 1], 1))
@pytest.mark.parametrize("device", DEVICES)
def test_processes_have_the_bits_that_were_sent_whatever_becomes_of_the_senders_memory(device, receivers):
    port, size, count = free_port(), 1 + receivers, 4
    store = store_at("127.0.0.1", int(port), size=size, seconds=60, is_master=True)
    processes = [started("receive", port, rank, size, device, count) for rank in range(1, size)]
    with freeing(device):
        link = Link("ipc", store, rank=0, size=size, seconds=60, device=device)
        expected = hand_over(link, device, count)
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err[-2000:]
            assert json.loads(out) == expected


class Workers(Server):
    """A server with one worker, a process of `memory_worker.py`, which takes one call after the other."""

    def call_workers(self, method, *, seconds, **arguments):
        self.calls.append(method)
        if method == "covey_join":  # a worker that waits does so for longer than the next call
            arguments |= {"limit": 30, "port": self.ports.get(arguments["backend"], arguments["port"])}
        if not self.is_free.acquire(timeout=seconds):
            raise ServerError(f"the worker is busy; {method} was not called")
        try:
            print(json.dumps([method, arguments]), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or '"it has ended"')
        finally:
            self.is_free.release()
        if isinstance(answer, str):
            raise ServerError(answer)
        return answer

    def is_paused(self):
        """It generates nothing, so that it is asked for no log-probabilities."""
        return True


@contextmanager
def worker_on(device, seconds=60):
    facts = dict.fromkeys((each.name for each in fields(ServerInfo)), 1)
    facts |= {
        "model": "policy",
        "dtype": "float32",
        "device": torch.device(device).type,
        "has_digest": True,
        "quantization": None,
    }
    client = Client(
        Address.of(None, "127.0.0.1", 1), Deadlines.of({"init": seconds}), paths=frozenset({"/collective_rpc"})
    )
    server = Workers(client, ServerInfo(**facts))
    server.calls, server.ports, server.is_free = [], {}, threading.Lock()
    server.process = started("obey", device)
    with server.process as process:
        server.call_workers("covey_sees", seconds=60, path="/")  # its start is no part of what is limited
        server.calls.clear()
        yield server
        process.stdin.close()
        assert process.wait(60) == 0, process.stderr.read()[-2000:]


def send(transport, model, version):
    """Bytes of an update, which digests of the worker have proved."""
    shipment = transport.prepare(Source(model), f"run:{version}")
    sent = transport.send(Source(model), f"run:{version}", shipment)
    assert texts_of(shipment.sums) == transport.server.digests()[0]
    transport.finish(shipment, is_exact=True)
    return sent


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_is_updated_in_place_over_the_transport_that_a_run_chooses(device, tmp_path, caplog):
    with worker_on(device) as server, caplog.at_level("INFO"), freeing(device):
        model = layers(device, seed=1)
        transport = transport_for(server, model, "auto", tmp_path, int(free_port()), world=World())
        name = "shared memory" if device == "cpu" else "CUDA IPC"
        assert caplog.messages == [f"Weights travel to the vLLM server by {name}."]
        transport.sends_changed, size = True, model.layers[0].mlp.weight.nbytes
        assert send(transport, model, 0) == 4 * size
        for layer in range(3):
            model.layers[layer].mlp.weight.data.add_(1.0)
            assert send(transport, model, 1 + layer) == size
        assert server.calls.count("covey_join") == 1
        del model, transport
    assert not list(tmp_path.iterdir())


class Copied(TorchDispatchMode):
    """Bytes of the new tensors, of 1 KiB and more, that operations return in this thread, and of what is copied into others."""

    def __init__(self):
        super().__init__()
        self.new, self.filled = 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        held = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        out = operation(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.nbytes >= 1024:
            is_copy = operation is torch.ops.aten.copy_.default
            held |= {out.untyped_storage().data_ptr()} if operation is torch.ops.aten.set_.source_Storage else set()
            self.filled += out.nbytes * is_copy
            self.new += out.nbytes * (not is_copy and out.untyped_storage().data_ptr() not in held)
        return out


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_stay_are_copied_once_and_into_memory_that_is_handed_over(device, tmp_path, monkeypatch):
    plain, sent = Link.send, Copied()

    def counted(link, messages):
        with sent:
            plain(link, messages)

    monkeypatch.setattr(Link, "send", counted)
    with worker_on(device) as server, freeing(device):
        model = layers(device, seed=1)
        transport = transport_for(server, model, "ipc", tmp_path, int(free_port()), world=World())
        source, size = Source(model, summon=lambda: None), sum(weight.nbytes for weight in model.parameters())
        server.facts = replace(server.facts, has_digest=False)  # a digest makes tensors of its own
        sent.new = sent.filled = 0
        with Copied() as here:
            shipment = transport.prepare(source, "run:1")
            assert transport.send(source, "run:1", shipment) == size
        server.facts = replace(server.facts, has_digest=True)
        assert (here.new, here.filled) == (0, 0)
        assert (sent.new, sent.filled) == (0 if device == "cpu" else size, size)
        assert server.digests()[0] == digests_of(model.named_parameters())
        del model, transport, source, shipment


@pytest.mark.parametrize("device", DEVICES)
def test_a_process_whose_group_another_has_replaced_is_not_waited_for(device):
    """The worker would wait for the one that joined last, and keep every later call waiting."""
    with worker_on(device, seconds=15) as server:
        mine, theirs = (BroadcastTransport(server, "ipc", 0, torch.device(device).type) for _ in range(2))
        mine.attempt()
        theirs.attempt()
        with pytest.raises(ServerError):
            mine.attempt()
        mine.attempt()


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_the_server_cannot_open_is_not_chosen(device, tmp_path, monkeypatch, caplog):
    gone = {"cpu": ["", "/proc/1/fd/not-there", 12], "cuda:0": ["GPU-of-another-machine"]}
    monkeypatch.setattr(covey_link, "handle_of", lambda block: gone["cuda:0" if block.is_cuda else "cpu"])
    with worker_on(device, seconds=5) as server:
        transport = transport_for(server, layers(device, seed=1), "auto", tmp_path, int(free_port()), world=World())
    assert isinstance(transport, DirectoryTransport)
    assert "by a folder that it sees (not by " in caplog.text
    assert "not by shared memory: sending weights by ipc failed: RuntimeError" in caplog.text
    if device != "cpu":
        assert (
            "not by CUDA IPC: sending weights by ipc failed: RuntimeError('this process does not see GPU" in caplog.text
        )


@pytest.mark.slow
def test_a_worker_that_cannot_reach_the_port_answers_and_the_folder_is_used(tmp_path, caplog):
    with worker_on("cpu", seconds=8) as server:
        server.ports["ipc"] = int(free_port())  # as in a container, whose own 127.0.0.1 it is
        transport = transport_for(server, layers("cpu", seed=1), "auto", tmp_path, int(free_port()), world=World())
    assert isinstance(transport, DirectoryTransport)
    assert "cannot be reached from" in caplog.text


SENDER = """
import json, sys, torch
from covey.process.link import covey_link
block = covey_link.block_of([torch.arange(5.0)], torch.device("cpu"), is_shared=True)
print(json.dumps(covey_link.handle_of(block)), flush=True)
sys.stdin.read()
"""


def test_a_sender_that_has_ended_leaves_no_process_that_holds_its_output():
    """`covey train 2>&1 | tee log` would not end before the server did."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SENDER], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as sender:
        block = covey_link.copy_of(json.loads(sender.stdout.readline()), torch.device("cpu"))
        _, errors = sender.communicate("", timeout=20)  # raises where the output stays open
    assert sender.returncode == 0, errors
    assert block[:20].view(torch.float32).tolist() == [0, 1, 2, 3, 4]
