"""Throughput of the endpoint: `covey serve`, vLLM's server and transformers' `generate`, the same requests, greedy, in float32.

    python benchmarks/serve.py                                   # covey serve beside generate
    python benchmarks/serve.py --vllm ~/vllm/bin/python          # and a vLLM server (its CPU build, on a machine without GPU)

A Qwen2 model with random weights, so that nothing ends early: every request says how many tokens it wants (`ignore_eos`), from a
sixteenth of `--max-tokens` up to all of it. The servers get all requests at once, over HTTP, from one client process;
`generate` gets them sorted by length, which helps it, in left-padded batches of `--batch`, and writes as many tokens as the
longest of a batch wants; only wanted ones count. Repeats alternate between the sides. Seconds are the clock's and the
processor's (of the server's processes, or of this one while it generates): the second is the fairer one on a machine that others
use too. Answers are compared token by token. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from covey import demo

SHAPES: dict[str, dict[str, Any]] = {
    "1m": {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 4},
    "10m": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4},
    "60m": {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 10},
}


@dataclass(frozen=True)
class Asked:
    """One request: token ids, and how many to write."""

    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True)
class Measured:
    """Seconds by the clock and of the processor, and the answers in token ids."""

    seconds: float
    cpu_seconds: float
    answers: list[list[int]]


def make_model(size: str, folder: Path) -> Qwen2ForCausalLM:
    """The model, saved with the shipped model's tokenizer for the servers."""
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    torch.manual_seed(0)
    shape = SHAPES[size]
    heads = shape["num_attention_heads"]
    config = Qwen2Config(
        vocab_size=512, num_key_value_heads=heads, max_position_embeddings=1024, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.05, **shape,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def requests(count: int, prompt_tokens: int, max_tokens: int) -> list[Asked]:
    rng = random.Random(0)
    prompt = lambda: [rng.randrange(3, 500) for _ in range(rng.randint(prompt_tokens // 2, prompt_tokens))]
    return [Asked(prompt(), rng.randint(max(1, max_tokens // 16), max_tokens)) for _ in range(count)]


# -- sides --------------------------------------------------------------------------------------------------------------


def by_generate(model: Any, asked: list[Asked], batch: int) -> Measured:
    began, cpu = time.perf_counter(), time.process_time()
    order = sorted(range(len(asked)), key=lambda i: asked[i].num_tokens)
    answers: list[list[int]] = [[] for _ in asked]
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        width, most = max(len(asked[i].prompt) for i in rows), max(asked[i].num_tokens for i in rows)
        ids = torch.tensor([[0] * (width - len(asked[i].prompt)) + asked[i].prompt for i in rows])
        mask = torch.tensor([[0] * (width - len(asked[i].prompt)) + [1] * len(asked[i].prompt) for i in rows])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=most, max_new_tokens=most, eos_token_id=None
            )
        for row, i in enumerate(rows):
            answers[i] = out[row, width : width + asked[i].num_tokens].tolist()
    return Measured(time.perf_counter() - began, time.process_time() - cpu, answers)


def by_server(url: str, pid: int, asked: list[Asked]) -> Measured:
    began, cpu = time.perf_counter(), cpu_of(pid)
    answers = asyncio.run(ask_all(url, asked))
    return Measured(time.perf_counter() - began, cpu_of(pid) - cpu, answers)


async def ask_all(url: str, asked: list[Asked]) -> list[list[int]]:
    limits: dict[str, Any] = {"max_retries": 3, "timeout": 3600}
    async with openai.AsyncOpenAI(base_url=url, api_key="none", **limits) as client:

        async def one(request: Asked) -> list[int]:
            body = {"ignore_eos": True, "return_token_ids": True}
            reply = await client.completions.create(
                model="bench", prompt=request.prompt, max_tokens=request.num_tokens, temperature=0, extra_body=body
            )
            return list(reply.choices[0].token_ids)

        return await asyncio.gather(*(one(request) for request in asked))


def cpu_of(pid: int) -> float:
    """Processor seconds of a process and its children."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


@contextlib.contextmanager
def running(command: list[str], port: int, wait: float, log: Path) -> Iterator[int]:
    """A server process that answers /health."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            until = time.monotonic() + wait
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{command[0]} did not start:\n" + log.read_text()[-2000:])
                time.sleep(0.3)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[Measured]]:
    model = make_model(options.size, folder / "model")
    asked = requests(options.requests, options.prompt_tokens, options.max_tokens)
    ports = {"covey serve": free_port(), "vllm serve": free_port()}
    commands = {
        "covey serve": [sys.executable, "-m", "covey", "serve", str(folder / "model"), "--served-model-name", "bench",
                        "--port", str(ports["covey serve"]), "--sampler-dtype", "float32", "--max-waiting", "100000"],
    }  # fmt: skip
    if options.vllm:
        commands["vllm serve"] = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), "--served-model-name", "bench", "--dtype", "float32",
                                  "--port", str(ports["vllm serve"]), "--host", "127.0.0.1", "--max-num-seqs", "256"]  # fmt: skip
    found: dict[str, list[Measured]] = {"generate": [], **{name: [] for name in commands}}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(command, ports[name], options.wait, folder / f"{name}.log"))
            for name, command in commands.items()
        }
        sides = {
            name: partial(by_server, f"http://127.0.0.1:{ports[name]}/v1", servers[name], asked) for name in servers
        }
        for side in sides.values():
            side()  # the first batch compiles, captures or allocates
        sides["generate"] = partial(by_generate, model, asked, options.batch)
        for _ in range(options.repeats):
            for name, side in sides.items():
                found[name].append(side())
                print(
                    f"{name:12} {found[name][-1].seconds:8.2f} s {found[name][-1].cpu_seconds:8.2f} s of the processor",
                    flush=True,
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="10m")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32, help="rows of a batch of generate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", help="Python of an environment of its own that holds vLLM")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds that a server may take to start")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default it takes half of the memory
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    asked = requests(options.requests, options.prompt_tokens, options.max_tokens)
    written = sum(one.num_tokens for one in asked)
    result: dict[str, object] = {**vars(options), "tokens": written}
    for name, runs in found.items():
        seconds, cpu = (statistics.median(getattr(run, kind) for run in runs) for kind in ("seconds", "cpu_seconds"))
        same = sum(a == b for a, b in zip(runs[0].answers, found["generate"][0].answers, strict=True))
        line = {
            "tokens_per_second": written / seconds,
            "tokens_per_cpu_second": written / cpu,
            "answers_as_generate": same,
        }
        result[name] = line
        print(f"{name:12} {written / seconds:8.0f} tokens/s {written / cpu:8.0f} per second of the processor, "
              f"{same} of {len(asked)} answers as generate's")  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
