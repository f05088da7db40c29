"""Rollout speed on a GPU: steps as written, CUDA graphs, and `model.generate`; one run, same model, prompts, sampling.

    python benchmarks/rollout_cuda.py                        # 0.5B, 64 prompts of 512 tokens x 8 completions of 1024
    python benchmarks/rollout_cuda.py --size 1.5b --only graphs generate

Random weights of Qwen2.5's shapes in bfloat16, random prompts, temperature 1, no end of sequence: every completion has
its full length. Repeats alternate between the sides after one warm-up each, medians are reported. The roofline is the
time that reading weights, keys, values and logits of all decode steps takes at the bandwidth that a copy reaches in the
same run; its share is of the whole call, prefill included. The last line is one JSON object.
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

from covey.rollout import NativeSampler, SamplingParams

SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
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


def sides(model: Any, options: argparse.Namespace) -> dict[str, Callable[[int], int]]:
    """Each takes a seed and returns the tokens that it wrote."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    prompts = torch.randint(0, vocabulary, (options.prompts, options.prompt_tokens), generator=generator)

    def native(**how: Any) -> Callable[[int], int]:
        rows = options.prompts * options.group
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


def bandwidth() -> float:
    """Bytes a second of a copy within the device's memory."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target, seconds = torch.empty_like(source), []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * 2**30 / min(seconds)


def roofline_bytes(model: Any, options: argparse.Namespace) -> float:
    """Bytes that all decode steps of a call must move: weights, each prompt's keys and values once, each row's own, logits."""
    config = model.config
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())  # the head is the embedding
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads
    per_token *= config.hidden_size // config.num_attention_heads
    rows, steps = options.prompts * options.group, options.max_tokens
    held = per_token * (options.prompts * options.prompt_tokens * steps + rows * steps * (steps + 1) / 2)
    return float(steps * (weights + 4 * rows * config.vocab_size) + held)


def timed(run: Callable[[int], int], seed: int) -> tuple[float, int, int]:
    """Seconds, tokens, and bytes held at most."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    tokens = run(seed)
    torch.cuda.synchronize()
    return time.perf_counter() - started, tokens, torch.cuda.max_memory_allocated()


def measure(runs: dict[str, Callable[[int], int]], repeats: int, best: float) -> dict[str, dict[str, float | str]]:
    """Medians of each side; one whose memory runs out says so instead. `best` is the roofline in seconds."""
    seen: dict[str, list[tuple[float, int, int]]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    for seed in range(repeats + 1):
        for name, run in runs.items():
            if name in failed:
                continue
            try:
                found = timed(run, seed)
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
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=SIDES, default=SIDES, help="sides to run")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark measures a GPU and PyTorch sees none; benchmarks/rollout.py measures a CPU.")
    model, device = new_model(SHAPES[options.size], "cuda"), torch.cuda.get_device_name()
    speed = bandwidth()
    best = roofline_bytes(model, options) / speed
    runs = sides(model, options)
    report = measure({name: runs[name] for name in options.only}, options.repeats, best)
    print(f"{device}, {speed / 1e12:.2f} TB/s; the decode steps' roofline is {best:.2f} s")
    print(f"{'side':28} {'seconds':>9} {'tokens/s':>10} {'roofline':>9} {'peak GiB':>9}")
    for name, found in report.items():
        if "failed" in found:
            print(f"{name:28} {found['failed']}")
        else:
            shown = (found[key] for key in ("seconds", "tokens_per_second", "roofline", "peak_gib"))
            print(f"{name:28}", *(f"{value:>9}" for value in shown))
    facts = {"device": device, "torch": torch.__version__, "bytes_per_second": speed, "roofline_seconds": best}
    print(json.dumps(facts | {"options": vars(options), "sides": report}))


if __name__ == "__main__":
    main()
