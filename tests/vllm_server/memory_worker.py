"""A process that weights are handed to, without vLLM: `python memory_worker.py receive ...` or `python memory_worker.py obey DEVICE`.

It is no fork of the tests', which CUDA would not survive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from covey.process.link import covey_link
from covey.process.link.covey_link import Link, store_at
from covey.rollout.vllm.worker import covey_worker


def started(*words: object) -> subprocess.Popen[str]:
    """A process of this file."""
    beside = [str(Path(str(module.__file__)).parent) for module in (covey_worker, covey_link)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*beside, *filter(None, sys.path)])}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, __file__, *map(str, words)], env=environment, text=True, **pipes)


def as_json(tensor: torch.Tensor) -> list[Any]:
    """Its type, shape and bytes."""
    return [str(tensor.dtype), list(tensor.shape), tensor.cpu().reshape(-1).view(torch.uint8).tolist()]


def layers(device: str, seed: int) -> torch.nn.Module:
    """Four layers of one matrix each, with a configuration that ties nothing."""
    draw, model = torch.Generator().manual_seed(seed), torch.nn.Module()
    matrices = [torch.nn.Linear(256, 1024, bias=False, device=device) for _ in range(4)]
    model.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"mlp": matrix}) for matrix in matrices)
    for weight in model.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draw))
    model.config = SimpleNamespace(get_text_config=SimpleNamespace)
    return model


def receive(port: str, rank: str, size: str, device: str, count: str) -> None:
    """Receive `count` updates; write what they brought, after the last. A layer is loaded in place."""
    layer = torch.nn.Linear(64, 1024, device=device)
    places = [weight.data_ptr() for weight in layer.parameters()]
    store = store_at("127.0.0.1", int(port), size=int(size), seconds=60)
    link = Link("ipc", store, rank=int(rank), size=int(size), seconds=60, device=device)
    updates = []
    for _ in range(int(count)):
        received = dict(link.receive())
        assert {weight.device.type for weight in received.values()} == {torch.device(device).type}
        layer.load_state_dict({name: received.pop(name) for name in ("weight", "bias")})
        updates.append({**{name: weight.detach().clone() for name, weight in layer.named_parameters()}, **received})
    assert places == [weight.data_ptr() for weight in layer.parameters()]
    sys.stdout.write(json.dumps([{name: as_json(weight) for name, weight in update.items()} for update in updates]))


class Worker(covey_worker.CoveyWorker):
    """The worker of a server, whose model is loaded in place."""

    def __init__(self, device: str) -> None:
        self.rank, self.device, self.model = 0, torch.device(device), layers(device, seed=2)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)

    def reload_weights(self, weights_iterator: Any, is_checkpoint_format: bool) -> None:
        own = dict(self.model.named_parameters())
        for name, weight in weights_iterator:
            assert weight.device == own[name].device
            own[name].data.copy_(weight)


def obey(device: str) -> None:
    """Call the methods of a worker that lines of JSON name, and answer with their results, or with the error as text."""
    worker = Worker(device)
    places = [weight.data_ptr() for weight in worker.model.parameters()]
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer: Any = [getattr(worker, method)(**arguments)]
        except Exception as error:  # noqa: BLE001 - told to the test
            answer = repr(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    assert places == [weight.data_ptr() for weight in worker.model.parameters()]


if __name__ == "__main__":
    {"receive": receive, "obey": obey}[sys.argv[1]](*sys.argv[2:])
