"""The wall time of rewards that wait, against the sum of their calls: plain, async, batched and streamed ones side by side.

    python benchmarks/rewards.py                 # calls that wait a second each, for a web server of this process
    python benchmarks/rewards.py --seconds 0.2 --repeats 3

Every case scores the same batches with one scorer. `sum` is what the calls took (`rewards/<name>/seconds`), `wall` what was
waited for them. The first batch stands apart: it starts threads and processes. The last case
trains the model that ships with Covey: there `wall` is the part of the rewards that decoding did not hide (`seconds/reward`),
from the second step on. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, demo
from covey.rewards import RewardSpec, Scorer, per_completion, reward
from covey.types import Completion, Group, Prompt

Work = Callable[[], Any]


class Slow(BaseHTTPRequestHandler):
    """Answers after the seconds that the path names."""

    def do_GET(self) -> None:
        time.sleep(float(self.path.strip("/")))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        return


def groups(count: int = 8, size: int = 4) -> list[Group]:
    answer = Completion(token_ids=torch.tensor([5, 6]), text="4", finish="stop")
    prompts = [Prompt(uid=f"0:{i}", text="2 + 2 =", token_ids=(1, 2), columns={"answer": "4"}) for i in range(count)]
    return [Group(prompt=prompt, completions=(answer,) * size) for prompt in prompts]


def plain(name: str, work: Work, **options: Any) -> RewardSpec:
    def call(completions: Sequence[Any]) -> list[float]:
        work()
        return [1.0] * len(completions)

    return RewardSpec(name=name, call=reward(**options)(call) if options else call)


def awaited(name: str, seconds: float, **options: Any) -> RewardSpec:
    async def call(completions: Sequence[Any]) -> list[float]:
        await asyncio.sleep(seconds)
        return [1.0] * len(completions)

    return RewardSpec(name=name, call=reward(**options)(call) if options else call)


def one_by_one(name: str, seconds: float, concurrency: int) -> RewardSpec:
    async def call(completion: Any, prompt: Any) -> float:
        await asyncio.sleep(seconds)
        return 1.0

    return RewardSpec(name=name, call=per_completion(pure=False, concurrency=concurrency)(call))


def cases(seconds: float, port: int) -> dict[str, list[RewardSpec]]:
    def fetch() -> None:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/{seconds}").read()

    def compute() -> None:
        until = time.thread_time() + seconds / 2
        while time.thread_time() < until:
            pass

    def sleep() -> None:
        time.sleep(seconds)

    return {
        "2 plain, sleeping": [plain("a", sleep), plain("b", sleep)],
        "2 plain, a web server": [plain("a", fetch), plain("b", fetch)],
        "4 plain, a web server": [plain(name, fetch) for name in "abcd"],
        "2 plain, declared in_thread": [plain(name, fetch, in_thread=True) for name in "ab"],
        "2 plain that wait, 1 that computes half as long": [plain("a", fetch), plain("b", fetch), plain("c", compute)],
        "2 plain, 2 async": [plain("a", fetch), plain("b", fetch), awaited("c", seconds), awaited("d", seconds)],
        "32 completions one by one, 16 at a time": [one_by_one("a", seconds / 4, 16)],
        "all of these kinds": [
            plain("a", fetch), plain("b", fetch), plain("c", compute), awaited("d", seconds),
            plain("e", lambda: time.sleep(seconds / 8), streams=True), one_by_one("f", seconds / 4, 16),
        ],
    }  # fmt: skip


def scored(rewards: Sequence[RewardSpec], batches: int) -> list[dict[str, float]]:
    """Wall and summed seconds of each batch."""
    scorer, found = Scorer(rewards), []
    for _ in range(batches):
        started = time.perf_counter()
        scorer.score(groups())
        wall = time.perf_counter() - started
        took = scorer.take_metrics()
        each = [float(took[f"rewards/{name}/seconds"].value) for name in scorer.names]
        found.append({"wall": wall, "sum": sum(each)})
    scorer.close()
    return found


def trained(seconds: float, port: int, steps: int) -> dict[str, float]:
    """Two rewards that stream and one plain one while a model decodes and learns: medians of the steps after the first."""
    waiting = cases(seconds, port)["2 plain, a web server"]
    quick = [plain(name, lambda: time.sleep(seconds / 8), streams=True, concurrency=8) for name in ("c", "d")]
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=64, num_generations=8, max_completion_length=48,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=str(demo.model_path()),
            reward_funcs=[demo.reward, *[each.call for each in (*waiting, *quick)]],
            args=args,
            train_dataset=Dataset.from_list(demo.rows("train", 64)),
        )
        trainer.train()
        written = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, written) if "seconds/reward" in line][1:]
    median = lambda key: statistics.median(line[key] for line in lines)
    sums = [sum(v for k, v in line.items() if k.startswith("rewards/") and k.endswith("/seconds")) for line in lines]
    return {"wall": median("seconds/reward"), "sum": statistics.median(sums), "rollout": median("seconds/rollout")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3, help="batches after the first")
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    found: dict[str, Any] = {}
    print(f"{'seconds':<50}{'first batch':>12}{'later: wall':>13}{'sum':>8}{'wall/sum':>10}")
    for name, rewards in cases(options.seconds, port).items():
        first, *later = scored(rewards, 1 + options.repeats)
        wall, total = (statistics.median(each[key] for each in later) for key in ("wall", "sum"))
        found[name] = {"first": first["wall"], "wall": wall, "sum": total}
        print(f"{name:<50}{first['wall']:>12.2f}{wall:>13.2f}{total:>8.2f}{wall / total:>10.2f}")
    step = found["a training run"] = trained(options.seconds, port, 2 + options.repeats)
    name = f"training: decoding {step['rollout']:.2f}, 2 plain, 2 streamed, 1"
    print(f"{name:<50}{'':>12}{step['wall']:>13.2f}{step['sum']:>8.2f}{step['wall'] / step['sum']:>10.2f}")
    server.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
