"""Rollout speed on a GPU: CUDA graphs, steps as written, PyTorch's attention, and `model.generate`; same model, prompts, sampling.

    python benchmarks/rollout_cuda.py                        # 0.5B, 64 prompts of 512 tokens x 8 completions of 1024
    python benchmarks/rollout_cuda.py --prompts 8 16 32 64 --prompt-tokens 256 --max-tokens 256 --only graphs
    python benchmarks/rollout_cuda.py --size 7b --prompts 8 --only graphs
    python benchmarks/rollout_cuda.py --size tiny --device cpu --prompts 2 --max-tokens 8 --repeats 1

Random weights of Qwen2.5's shapes in bfloat16, random prompts, temperature 1, no end of sequence: every completion has
its full length. Repeats alternate between the sides after one warm-up each, medians are shown. The roofline is the
time that reading weights, keys, values and logits of all decode steps takes at the bandwidth that a copy reaches in the
same run; its share is of the whole call, prefill included. "plan" is what `covey doctor plan` expects of such a call on
this card, with the native engine's kernels. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from covey.doctor.roofline.gpus import GPUS, Gpu
from covey.doctor.roofline.rollout import PASSES_OF_LOGITS, Decoding, kernels_of
from covey.learner.memory_estimate import cache_bytes
from covey.rollout import NativeSampler, SamplingParams

SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    },
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
SHARED = {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}
SIDES = ("eager", "graphs", "graphs, PyTorch attention", "generate")


class NoText:
    """Random ids spell nothing."""

    eos_token_id = None

    def decode(self, ids: Any, **options: Any) -> str:
        return ""


def new_model(shape: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(**(SHARED | shape), bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval()


def sides(model: Any, options: argparse.Namespace, count: int) -> dict[str, Callable[[int], int]]:
    """For `count` prompts. Each takes a seed and returns the tokens that it wrote."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    prompts = torch.randint(0, vocabulary, (count, options.prompt_tokens), generator=generator)

    def native(**how: Any) -> Callable[[int], int]:
        rows = count * options.group
        made: list[NativeSampler] = []

        def run(seed: int) -> int:
            if not made:
                made.append(NativeSampler(model, NoText(), eos_ids=(), max_rows=rows, **how))
            params = SamplingParams(max_tokens=options.max_tokens, seed=seed)
            groups = made[0].sample(prompts.tolist(), options.group, params)
            return sum(completion.num_tokens for group in groups for completion in group.completions)

        return run

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        ids = prompts.repeat_interleave(options.group, 0).to(model.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=options.max_tokens,
                pad_token_id=0,
            )
        return int(out[:, ids.shape[1] :].numel())

    return {
        "eager": native(cuda_graphs=False),
        "graphs": native(),
        "graphs, PyTorch attention": native(attention="torch"),
        "generate": generate,
    }


def bandwidth(device: str) -> float:
    """Bytes a second of a copy within the device's memory."""
    source = torch.empty(2**30 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(10):
        wait(device)
        started = time.perf_counter()
        target.copy_(source)
        wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(seconds)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def decoding(model: Any, gpu: Gpu) -> Decoding:
    """The model as the plan sees it, on the native engine."""
    config, size = model.config, sum(parameter.numel() for parameter in model.parameters())
    read = size if config.tie_word_embeddings else size - model.get_input_embeddings().weight.numel()
    return Decoding(
        gpu=gpu,
        gpus=1,
        weights=2 * read,
        parameters=size,
        key_bytes=cache_bytes(config, 1, 2),
        room=10**15,
        item_bytes=2,
        kernels=kernels_of("qwen2", config.num_hidden_layers, is_vllm=False),
        logit_bytes=PASSES_OF_LOGITS * 2 * config.vocab_size,
    )


def roofline_bytes(one: Decoding, options: argparse.Namespace, count: int) -> float:
    """Bytes that all decode steps of a call must move: weights, each prompt's keys and values once, each row's own, logits."""
    rows, steps = count * options.group, options.max_tokens
    held = one.key_bytes * (count * options.prompt_tokens * steps + rows * steps * (steps + 1) / 2)
    return float(steps * (one.weights + one.logit_bytes * rows) + held)


def gpu_named(device: str) -> Gpu | None:
    """The card in the plan's list, by its name; None if it is not there."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((gpu for key, gpu in GPUS.items() if key in name.replace(" ", "").replace("NVIDIA", "")), None)


def timed(run: Callable[[int], int], seed: int, device: str) -> tuple[float, int, int]:
    """Seconds, tokens, and bytes held at most."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    wait(device)
    started = time.perf_counter()
    tokens = run(seed)
    wait(device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return time.perf_counter() - started, tokens, peak


def measure(
    runs: dict[str, Callable[[int], int]], repeats: int, best: float, device: str
) -> dict[str, dict[str, float | str]]:
    """Medians of each side; one whose memory runs out says so instead. `best` is the roofline in seconds."""
    seen: dict[str, list[tuple[float, int, int]]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    for seed in range(repeats + 1):
        for name, run in runs.items():
            if name in failed:
                continue
            try:
                found = timed(run, seed, device)
            except torch.OutOfMemoryError as error:
                failed[name] = str(error).splitlines()[0]
                continue
            if seed:
                seen[name].append(found)
    report: dict[str, dict[str, float | str]] = {name: {"failed": said} for name, said in failed.items()}
    for name, measured in seen.items():
        if name not in failed:
            seconds = statistics.median(second for second, _, _ in measured)
            report[name] = {
                "seconds": round(seconds, 3),
                "tokens_per_second": round(measured[0][1] / seconds, 1),
                "roofline": round(best / seconds, 3),
                "peak_gib": round(max(peak for _, _, peak in measured) / 2**30, 2),
            }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="0.5b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64], help="a table for each")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=SIDES, default=SIDES, help="sides to run")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This benchmark measures a GPU and PyTorch sees none; benchmarks/rollout.py measures a CPU.")
    model, speed, gpu = (
        new_model(SHAPES[options.size], options.device),
        bandwidth(options.device),
        gpu_named(options.device),
    )
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{name}, {speed / 1e12:.2f} TB/s", flush=True)
    shown, tables = ("seconds", "tokens_per_second", "roofline", "peak_gib"), {}
    print(f"{'rows':>5} {'side':28} {'seconds':>9} {'tokens/s':>10} {'roofline':>9} {'peak GiB':>9} {'plan, s':>9}")
    for count in options.prompts:
        rows, one = count * options.group, decoding(model, gpu or GPUS["H100"])
        best = roofline_bytes(one, options, count) / speed
        lengths = (options.prompt_tokens, options.max_tokens, options.max_tokens)
        plan = round(one.seconds(rows, options.group, *lengths), 3) if gpu else None
        runs = sides(model, options, count)
        report = measure({side: runs[side] for side in options.only}, options.repeats, best, options.device)
        for side, found in report.items():
            cells = [found["failed"]] if "failed" in found else [f"{found[key]:>9}" for key in shown]
            print(f"{rows:>5} {side:28}", *cells, f"{plan if side == 'graphs' and plan else '':>9}", flush=True)
        tables[rows] = {"roofline_seconds": round(best, 4), "plan_seconds": plan, "sides": report}
    facts = {"device": name, "torch": torch.__version__, "bytes_per_second": speed, "size": options.size}
    print(json.dumps(facts | {"options": vars(options), "tables": tables}))


if __name__ == "__main__":
    main()
