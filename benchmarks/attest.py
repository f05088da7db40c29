"""`covey attest` against real servers: faults that are planted in their weights, and honest servers that it must not refuse.

    python benchmarks/attest.py --vllm .venv-vllm/bin/python

The servers are real vLLM on this processor (`covey serve-vllm`) and `covey serve`. The demo model is trained for eight steps, all weights and an
adapter. A fault is other weights, sent to a running server by the endpoint that a run uses, or a server in another type. `tests/vllm_server/test_real_attest.py`
asserts a part of this table.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "vllm_server")]
REFUSED, ATTESTED, UNDECIDED = 73, 0, 1
OTHER_BASE, OTHER_BEFORE = ("--other", "base"), ("--other", "before")


@dataclass(frozen=True)
class Trial:
    """One question to a server: what it computes with, the folder that it is expected to have, and the exit code that is right."""

    served: str
    """Folder whose weights it computes with; `adapter:NAME` for an adapter."""
    model: str
    code: int
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Served:
    """A server, started with one folder's weights, and the questions that it is asked."""

    started: str
    trials: Sequence[Trial]
    words: Sequence[str] = ()
    """Options of vLLM, or of `covey serve`."""
    is_native: bool = False


def honest(*names: str, words: Sequence[str] = ()) -> list[Trial]:
    return [Trial(name, name, ATTESTED, words) for name in names]


def faults(dtype: str) -> list[Trial]:
    """Weights that are not those of `now`, by a server that computes in this type."""
    words = ("--dtype", dtype)
    names = ["a layer zeroed", "a layer at random", "4 bits"] + ["8 bits", "base", "before", "a layer of the base"] * (
        dtype == "float32"
    )
    found = [Trial(name, "now", REFUSED, words) for name in names]
    found += [
        Trial("base", "now", REFUSED, (*words, *OTHER_BASE)),
        Trial("before", "now", REFUSED, (*words, *OTHER_BEFORE)),
    ]
    found += [Trial("adapter:before", "adapter:now", REFUSED, (*words, "--other", "adapter:before"))]
    return [*found, Trial("base", "adapter:now", REFUSED, (*words, *OTHER_BASE))]


F32, F16, BF16 = ("--dtype", "float32"), ("--dtype", "float16"), ("--dtype", "bfloat16")
OF_DEMO = ("base", "now", "before", "adapter:now")
SERVERS: dict[str, Served] = {
    "vLLM, float32": Served(
        "base", [*honest(*OF_DEMO, words=F32), *honest("now", words=(*F32, *OTHER_BASE)), *faults("float32")], F32
    ),
    "vLLM, bfloat16": Served(
        "base",
        [
            *honest(*OF_DEMO, words=BF16),
            *honest("now", words=(*BF16, *OTHER_BASE)),
            *honest("adapter:now", words=(*BF16, *OTHER_BASE)),
            *faults("bfloat16"),
            Trial("now", "now", REFUSED, F32),
            Trial("now", "now", REFUSED, F16),
            *(Trial(name, "small", UNDECIDED, (*BF16, *OTHER_BASE)) for name in ("small", "base")),
        ],
        BF16,
    ),
    "vLLM, float32, no prefix cache": Served(
        "llama 0", honest("llama 0", "llama 1", words=F32), (*F32, "--no-enable-prefix-caching")
    ),
    "vLLM, bfloat16, Qwen3": Served("qwen3 0", honest("qwen3 0", "qwen3 1", words=BF16), BF16),
    "vLLM, float32, GPT-2": Served("gpt2 0", honest("gpt2 0", "gpt2 1", words=F32), F32),
    "vLLM, bfloat16, Mistral": Served("mistral 0", honest("mistral 0", "mistral 1", words=BF16), BF16),
    "vLLM, bfloat16, 66 million parameters": Served("66m 0", honest("66m 0", "66m 1", words=BF16), BF16),
    "covey serve, float32": Served(
        "now",
        [
            *honest("now", words=F32),
            *(Trial("now", other, REFUSED, F32) for other in ("base", "before", "a layer of the base", "4 bits")),
        ],
        ("--sampler-dtype", "float32"),
        is_native=True,
    ),
    "covey serve, adapters": Served(
        "base",
        [
            *honest("base", "adapter:now", words=F32),
            Trial("adapter:before", "adapter:now", REFUSED, F32),
            Trial("base", "adapter:now", REFUSED, F32),
        ],
        ("--sampler-dtype", "float32"),
        is_native=True,
    ),
    "covey serve, float16": Served(
        "now", [*honest("now", words=F16), Trial("now", "now", REFUSED, F32)], ("--dtype", "float16"), is_native=True
    ),
    "covey serve, bfloat16": Served(
        "now",
        [
            *honest("now", words=BF16),
            *honest("now", words=(*BF16, *OTHER_BASE)),
            Trial("now", "base", REFUSED, (*BF16, "--other", "now")),
            Trial("now", "now", REFUSED, F32),
        ],
        ("--sampler-dtype", "bfloat16"),
        is_native=True,
    ),
}


@dataclass(eq=False)
class Folders:
    """Folders of weights by name, each made when it is first asked for."""

    parent: Path
    made: dict[str, Path] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Path:
        if name not in self.made:
            self.made[name] = self.make(name)
        return self.made[name]

    def make(self, name: str) -> Path:
        from covey.demo import model_path
        from covey.models import load_model

        if name == "base":
            return Path(model_path())
        if name == "small":  # an update that bfloat16 nearly rounds away
            return self.trained("small", "--learning-rate", "1e-5") / "checkpoint-8"
        if name in ("before", "now"):
            return self.trained("full", "--learning-rate", "1e-4") / f"checkpoint-{4 if name == 'before' else 8}"
        if name.startswith("adapter:"):
            run = self.trained("lora", "--learning-rate", "1e-3", "--lora-r", "4")
            return run / f"checkpoint-{4 if name.endswith('before') else 8}"
        family, _, seed = name.rpartition(" ")
        if seed.isdigit():
            return self.save(name, random_model(family, int(seed)))
        return self.save(name, broken(load_model(str(self["now"])), load_model("demo"), name))

    def trained(self, name: str, *words: str) -> Path:
        """The folder of a run of eight steps."""
        from covey.cli import main

        if name not in self.made:
            self.made[name] = self.parent / name
            command = [
                "train",
                "--model",
                "demo",
                "--dataset",
                "demo",
                "--reward",
                "math",
                "--output-dir",
                str(self.made[name]),
            ]
            command += ["--max-steps", "8", "--save-steps", "4", "--max-completion-length", "48", "--report-to", "none"]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                assert main([*command, "--use-cpu", *words]) == 0
        return self.made[name]

    def save(self, name: str, model: Any) -> Path:
        from covey.demo import model_path
        from covey.models import load_tokenizer

        folder = self.parent / name.replace(" ", "-")
        model.save_pretrained(folder)
        load_tokenizer(None, str(model_path())).save_pretrained(folder)
        return folder


def random_model(family: str, seed: int) -> Any:
    """A model of random weights whose heads have a width that vLLM takes on a CPU."""
    from weight_updates import SHAPES

    from kit import tiny_model

    size: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 512}
    if family == "66m":
        size |= {**SHAPES["66m"], "num_key_value_heads": SHAPES["66m"]["num_attention_heads"], "head_dim": 64}
        return tiny_model("qwen2", seed=seed, **size)
    return tiny_model(family, seed=seed, layers=3, hidden=64, **size)


@torch.no_grad()
def broken(model: Any, base: Any, fault: str) -> Any:
    """The model with a fault in its weights."""
    layer = model.model.layers[2]
    if fault == "a layer zeroed":
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    elif fault == "a layer of the base":
        layer.load_state_dict(copy.deepcopy(base.model.layers[2].state_dict()))
    elif fault == "a layer at random":
        generator = torch.Generator().manual_seed(0)
        for weight in layer.parameters():
            if weight.dim() > 1:
                weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    else:
        most = 2.0 ** (int(fault.removesuffix(" bits")) - 1) - 1
        for each in model.model.layers.parameters():
            if each.dim() > 1:
                scale = each.abs().amax(1, keepdim=True) / most
                each.copy_((each / scale).round() * scale)
    return model


def send(port: int, folder: Path, version: int, scratch: Path) -> None:
    """Give a vLLM server other weights, as a run does."""
    from covey.models import load_model, load_tokenizer
    from covey.rollout import SamplingParams
    from covey.rollout.vllm import ServerSampler

    tokenizer = load_tokenizer(None, str(folder))
    sampler = ServerSampler(
        load_model(str(folder)), tokenizer, port=port, directory=scratch, attest="off", transport="directory"
    )
    list(sampler.sample(["1 + 1 ="], 1, SamplingParams(max_tokens=1)))


@contextlib.contextmanager
def native(folders: Folders, server: Served) -> Iterator[int]:
    """Port of a `covey serve` with the adapters of the questions."""
    from real_server import free_port

    from covey.rollout.vllm.client import Address, Client

    port = free_port()
    names = [trial.served for trial in server.trials if trial.served.startswith("adapter:")]
    adapters = [word for name in dict.fromkeys(names) for word in ("--adapter", f"{name[8:]}={folders[name]}")]
    command = [
        sys.executable,
        "-m",
        "covey",
        "serve",
        str(folders[server.started]),
        "--port",
        str(port),
        *adapters,
        *server.words,
    ]
    with (folders.parent / "serve.log").open("ab") as log:
        process = subprocess.Popen([*command, "--use-cpu"], stdout=log, stderr=log, env=environment())
    try:
        Client(Address.of(None, "127.0.0.1", port)).wait_until_up(120, lambda: None)
        yield port
    finally:
        process.kill()
        process.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def attested(port: int, folders: Folders, trial: Trial, names: Sequence[str]) -> dict[str, Any]:
    """What `covey attest` answers: its figures, exit code and seconds."""
    from covey.cli import main

    places = {"base", "before", "adapter:before", "now"}
    words = [str(folders[word]) if word in places else word for word in trial.words]
    command = ["attest", f"http://127.0.0.1:{port}", "--model", str(folders[trial.model]), "--json", *words]
    if len(names) > 1:
        adapter = trial.served.removeprefix("adapter:")
        command += ["--served-name", adapter if trial.served.startswith("adapter:") else names[0]]
    printed, began = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(printed):
        code = main(command)
    seconds = time.perf_counter() - began
    return {"code": code, "seconds": seconds, **json.loads(printed.getvalue().splitlines()[-1])}


def measure(name: str, folders: Folders) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Start a server, ask its questions in an order that changes its weights as seldom as possible, and yield the answers."""
    server = SERVERS[name]
    if server.is_native:
        with native(folders, server) as port:
            names = served_names(port)
            for trial in server.trials:
                yield trial, attested(port, folders, trial, names)
        return
    from real_server import Running

    folder = Path(tempfile.mkdtemp(dir=folders.parent))
    rank = 8 if server.started == "base" else None
    running = Running(folder, str(folders[server.started]), rank, server.words)
    try:
        now, loaded = server.started, set[str]()
        for version, trial in enumerate(
            sorted(server.trials, key=lambda trial: (trial.served != server.started, trial.served))
        ):
            if trial.served.startswith("adapter:"):
                if now != "base":
                    send(running.port, folders["base"], version, folder)
                    now = "base"
                load_adapter(running.port, trial.served, folders, loaded)
            elif trial.served != now:
                send(running.port, folders[trial.served], version, folder)
                now = trial.served
            yield trial, attested(running.port, folders, trial, served_names(running.port))
    finally:
        running.stop()


def load_adapter(port: int, name: str, folders: Folders, loaded: set[str]) -> None:
    from covey.rollout.vllm.client import Address, Client

    if name not in loaded:
        body = {"lora_name": name.removeprefix("adapter:"), "lora_path": str(folders[name])}
        Client(Address.of(None, "127.0.0.1", port)).post("/v1/load_lora_adapter", body, seconds=60)
        loaded.add(name)


def served_names(port: int) -> list[str]:
    from covey.rollout.vllm.client import Address, Client

    client = Client(Address.of(None, "127.0.0.1", port))
    return [entry["id"] for entry in client.call("GET", "/v1/models", seconds=60)["data"]]


def row(name: str, trial: Trial, found: dict[str, Any]) -> str:
    slopes = ", ".join(f"{slope['value']:.2f} ± {slope['error']:.2g}" for slope in found["slopes"].values())
    right = "" if found["code"] == trial.code else " **WRONG**"
    cells = [
        name,
        trial.served,
        trial.model,
        " ".join(trial.words),
        f"{found['distance']:.2g}",
        f"{found['limit']:.2g}",
        slopes,
    ]
    return " | ".join([*cells, found["verdict"] + right, f"{found['chance']:.1e}", f"{found['seconds']:.1f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="interpreter of the environment that has vLLM")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    chosen = parser.parse_args()
    os.environ |= {"COVEY_VLLM_PYTHON": chosen.vllm}
    torch.set_num_threads(1)
    print(
        "| server | computes with | expected | | distance | limit | slope | verdict | chance of error | seconds |",
        flush=True,
    )
    print("|---|---|---|---|--:|--:|---|---|--:|--:|")
    with tempfile.TemporaryDirectory() as parent:
        folders, right = Folders(Path(parent)), {code: [0, 0] for code in (ATTESTED, REFUSED, UNDECIDED)}
        for name in chosen.servers:
            for trial, found in measure(name, folders):
                print(f"| {row(name, trial, found)} |", flush=True)
                right[trial.code][0] += found["code"] == trial.code
                right[trial.code][1] += 1
    for code, of in {
        ATTESTED: "honest: attested",
        REFUSED: "faults: refused",
        UNDECIDED: "too small to see: undecided",
    }.items():
        print(f"{of} {right[code][0]} of {right[code][1]}")


if __name__ == "__main__":
    main()
