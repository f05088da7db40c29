"""Rollout speed, side by side: the native engine, our plain loop, `model.generate`; one run, same model, prompts, sampling.

    python benchmarks/rollout.py --size 10m --shots 0 --repeats 5      # the comparison
    python benchmarks/rollout.py --size 60m --growth                   # a decode step: roofline, and how its cost grows
    python benchmarks/rollout.py --size 60m --memory                   # peak memory beside weights and keys and values held

A Qwen2-architecture model is trained briefly on GSM8K text (once; kept in the cache folder), so that completions end by
themselves and their lengths vary. All sides sample at temperature 1 up to `--max-tokens` for `--prompts` questions with
`--group` completions each; repeats alternate between the sides, medians are reported. Ratios are against the better of
`generate`'s precisions: float32, and bfloat16 where the processor multiplies it. `--cpu-time` counts processor time instead of
the clock's, for a machine that others use too (then set one thread). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from resident import peak_since, resident
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from covey import demo
from covey.config.checks import processor_has_bfloat16
from covey.kernels.decode import decode_kernels
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler
from covey.rollout.batches import DecodeBatch, PrefillBatch
from covey.rollout.decoder import DecoderForward
from covey.rollout.forward import Forward, plain_cache
from covey.rollout.kv_cache import KVCache, rounded
from covey.types import Group

DATA = Path(os.environ.get("COVEY_BENCHMARK_DATA", Path(__file__).parents[1] / "tests" / "data" / "gsm8k"))
CACHE = Path(os.environ.get("COVEY_BENCHMARK_CACHE", Path.home() / ".cache" / "covey-benchmarks"))
SHAPES: dict[str, dict[str, Any]] = {
    "10m": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4},
    "60m": {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 10},
}
END = "<|end|>"
FASTER = torch.bfloat16 if processor_has_bfloat16() else torch.float32
"""Type that this processor multiplies fastest."""


@functools.cache
def rows(split: str) -> list[dict[str, str]]:
    """GSM8K's questions and answers: from the folder if they are there, else from the hub."""
    file = DATA / f"{split}.jsonl"
    if file.is_file():
        return [json.loads(line) for line in file.read_text().splitlines()]
    from datasets import load_dataset

    try:
        return [dict(row) for row in load_dataset("openai/gsm8k", "main", split=split)]
    except Exception as error:  # whatever a hub that cannot be reached, or is not what it was, raises
        raise SystemExit(
            f"{file} is not there, and openai/gsm8k could not be fetched ({type(error).__name__}); put GSM8K's train.jsonl "
            "and test.jsonl into a folder and name it in COVEY_BENCHMARK_DATA."
        ) from error


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 4096 tokens, trained on the training split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text(row) for row in rows("train")), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def text(row: dict[str, str]) -> str:
    return f"Question: {row['question']}\nAnswer: {row['answer']}"


def trained(size: str, steps: int) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The benchmark's model and tokenizer, from the cache folder or trained now."""
    folder = CACHE / f"qwen2-{size}-{steps}"
    if folder.is_dir():
        return Qwen2ForCausalLM.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = new_tokenizer()
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **SHAPES[size], eos_token_id=0, pad_token_id=0, bos_token_id=None))
    encoded = [tokenizer(text(row) + END)["input_ids"][:320] for row in rows("train")]
    train(model, encoded, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def train(model: Qwen2ForCausalLM, encoded: list[list[int]], steps: int, batch: int = 16) -> None:
    """Plain next-token training, enough for lengths to look like the data's."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = random.Random(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        chosen = draw.sample(encoded, batch)
        longest = max(map(len, chosen))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in chosen])
        labels = torch.tensor([row + [-100] * (longest - len(row)) for row in chosen])
        with torch.autocast("cpu", torch.bfloat16, enabled=processor_has_bfloat16()):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"training the benchmark's model: step {step + 1} of {steps}, loss {loss.item():.2f}", flush=True)


def questions(count: int, shots: int) -> list[str]:
    """Prompts with `shots` worked examples before the question."""
    examples = [text(row) + "\n\n" for row in rows("train")[:200]]
    draw = random.Random(1)
    asked = rows("test")[:count]
    return ["".join(draw.sample(examples, shots)) + f"Question: {row['question']}\nAnswer:" for row in asked]


def by_generate(model: Any, tokenizer: Any, prompts: list[str], n: int, params: SamplingParams) -> int:
    """Tokens written by `model.generate`, all prompts in one padded batch."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        out = model.generate(
            **batch, do_sample=True, temperature=params.temperature, top_k=0, top_p=1.0, max_new_tokens=params.max_tokens,
            num_return_sequences=n, pad_token_id=0,
        )  # fmt: skip
    new = out[:, batch["input_ids"].shape[1] :]
    ended = (new == 0).int().argmax(-1)
    return int(torch.where((new == 0).any(-1), ended + 1, new.shape[1]).sum())


def by_sampler(sampler: Any, prompts: list[str], n: int, params: SamplingParams) -> int:
    groups: list[Group] = list(sampler.sample(prompts, n, params))
    return sum(completion.num_tokens for group in groups for completion in group.completions)


def sides(options: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Callable[[int], int]]:
    """What is compared: each takes a seed and returns how many tokens it wrote."""
    prompts = questions(options.prompts, options.shots)
    n = options.group
    params = lambda seed: SamplingParams(max_tokens=options.max_tokens, seed=seed)
    native, plain = NativeSampler(model, tokenizer, dtype="float32"), TransformersSampler(model, tokenizer)
    found: dict[str, Callable[[int], int]] = {
        "native fp32": lambda seed: by_sampler(native, prompts, n, params(seed)),
        "plain loop fp32": lambda seed: by_sampler(plain, prompts, n, params(seed)),
        "generate fp32": lambda seed: by_generate(model, tokenizer, prompts, n, params(seed)),
    }
    if processor_has_bfloat16():
        folder = CACHE / f"qwen2-{options.size}-{options.steps}"
        half = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        copied = NativeSampler(model, tokenizer, dtype="bfloat16")
        found["native bf16"] = lambda seed: by_sampler(copied, prompts, n, params(seed))
        found["generate bf16"] = lambda seed: by_generate(half, tokenizer, prompts, n, params(seed))
    return found


def measure(
    runs: dict[str, Callable[[int], int]], repeats: int, now: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Median seconds and tokens of each side; the sides take turns, after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tokens: dict[str, list[int]] = {name: [] for name in runs}
    for seed in range(repeats + 1):
        for name, run in runs.items():
            torch.manual_seed(seed)
            started = now()
            written = run(seed)
            if seed:
                seconds[name].append(now() - started)
                tokens[name].append(written)
    return {
        name: {"seconds": statistics.median(seconds[name]), "tokens": statistics.median(tokens[name])} for name in runs
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="10m")
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120, help="training steps of the benchmark's model")
    parser.add_argument(
        "--only", nargs="*", help="sides to run; native, generate: in this processor's faster precision"
    )
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of wall time")
    parser.add_argument(
        "--growth", action="store_true", help="time decode steps by batch, prompt length and group size"
    )
    parser.add_argument("--memory", action="store_true", help="peak memory of the native engine")
    parser.add_argument("--vllm", metavar="PYTHON", help="python of an environment that has vLLM, to compare with")
    options = parser.parse_args()
    now = time.process_time if options.cpu_time else time.perf_counter
    model, tokenizer = trained(options.size, options.steps)
    if options.growth:
        growth(model, now)
        return
    if options.memory:
        memory(options, model, tokenizer)
        return
    runs = sides(options, model, tokenizer)
    peer = {"vLLM bf16": by_vllm(options)} if options.vllm else {}  # first: it fails early if it fails
    faster = "bf16" if processor_has_bfloat16() else "fp32"
    chosen = [name if " " in name else f"{name} {faster}" for name in options.only or runs]
    if unknown := set(chosen) - set(runs):
        raise SystemExit(f"--only {', '.join(sorted(unknown))} is no side; there are {', '.join(runs)}.")
    report(options, measure({name: runs[name] for name in chosen}, options.repeats, now) | peer)


def by_vllm(options: argparse.Namespace) -> dict[str, float]:
    """Median seconds and tokens of vLLM on the same model folder, prompts and sampling, in a process of its own."""
    task = {
        "model": str(CACHE / f"qwen2-{options.size}-{options.steps}"),
        "prompts": questions(options.prompts, options.shots),
        "group": options.group,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "cpu_time": options.cpu_time,
    }
    command = [options.vllm, str(Path(__file__).with_name("rollout_vllm.py"))]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM failed: {done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: statistics.median(values) for name, values in found.items()}


def step_seconds(
    forward: Forward, prompts: int, group: int, length: int, written: int, now: Callable[[], float]
) -> float:
    """Median of the last ten decode steps of `prompts` x `group` rows after `written` tokens each."""
    kernels = decode_kernels(forward.device, forward.dtype, forward.layers[0].width)
    cache = plain_cache(forward, 2**31, kernels)
    forward.reserve(rounded(length) + written)
    slots = cache.add_prompts([length] * prompts)
    for slot in slots:
        ids = torch.zeros(1, rounded(length), dtype=torch.int64)
        forward.prefill(ids, torch.arange(rounded(length))[None], PrefillBatch(cache, slots[slot : slot + 1]))
    cache.add_rows(prompts * group)
    cache.set_row_owners([p for p in range(prompts) for _ in range(group)])
    tokens, seconds = torch.zeros(cache.num_computed, dtype=torch.int64), []
    for step in range(written):
        cache.begin_step()
        started = now()
        forward.decode(tokens, tokens + length + step, DecodeBatch(cache))
        seconds.append(now() - started)
        cache.end_step()
    return statistics.median(seconds[-10:])


def calibrated(now: Callable[[], float]) -> tuple[float, float]:
    """This machine's bytes a second (reading 256 MiB) and operations a second in its faster type (a product of 2048 rows)."""

    def best(run: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(7):
            started = now()
            run()
            seconds.append(now() - started)
        return min(seconds)

    wide = torch.ones(2**26)
    weight = x = torch.randn(2048, 2048, dtype=FASTER)
    product = lambda: torch.mm(x, weight)
    if FASTER.itemsize == 2:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2048)
        product = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return 2**28 / best(wide.sum), 2 * 2048**3 / best(product)


def growth(model: Any, now: Callable[[], float]) -> None:
    """Tables of decode steps after 64 tokens, and the share of the roofline at batch 64."""
    forward = DecoderForward(model, FASTER)
    bandwidth, rate = calibrated(now)
    print(
        f"calibration: {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s in {FASTER}, {torch.get_num_threads()} threads"
    )
    shape = model.config
    per_token = sum(layer.bytes_per_token(FASTER) for layer in forward.layers)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2)  # the head is tied to the embedding
    with torch.no_grad():
        timed = lambda prompts, group, length: step_seconds(forward, prompts, group, length, 64, now)
        measured = timed(8, 8, 96)
        moved = FASTER.itemsize * weights + per_token * (8 * 96 + 64 * 64) + 4 * 64 * shape.vocab_size
        done = 64 * (2 * weights + 4 * shape.num_attention_heads * forward.width * len(forward.layers) * (96 + 64))
        bound = max(moved / bandwidth, done / rate)
        print(
            f"8 prompts of 96 x 8: {1e3 * measured:.2f} ms a step; roofline {1e3 * bound:.2f} ms, {bound / measured:.0%} of it"
        )
        show = lambda name, row: print(
            f"{name:34}" + "".join(f"{key:>6}: {1e3 * value:7.2f}" for key, value in row.items())
        )
        show("batch (groups of 8, prompt 96), ms", {8 * p: timed(p, 8, 96) for p in (1, 2, 4, 8, 16, 32)})
        show("prompt (4 x 8), ms", {length: timed(4, 8, length) for length in (32, 128, 512, 1024, 4064)})
        show("group (4 prompts of 1024), ms", {n: timed(4, n, 1024) for n in (1, 2, 4, 8, 16, 32)})


def memory(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Resident memory at most, beside the weights, their copy where they are sampled in bfloat16, and the keys and values held at most.

    Counted from after a warm-up on a tiny model in the same precision, so the libraries' own code is left out. All else
    that sampling takes is "everything else": activations, holes in the heap, what oneDNN keeps for every size of product.
    """
    dtype: Any = str(FASTER).removeprefix("torch.")
    small = demo.model_path()  # libraries load and kernels are made on a model of its own
    warm = NativeSampler(
        AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32),
        AutoTokenizer.from_pretrained(small),
        dtype=dtype,
    )
    by_sampler(warm, ["2 + 2 ="] * options.prompts, options.group, SamplingParams(max_tokens=40, seed=0))
    for parameter in model.parameters():
        parameter.sum()  # read from the file now, not when it is copied
    prompts = questions(options.prompts, options.shots)
    before = resident("VmRSS")
    sampler = NativeSampler(model, tokenizer, dtype=dtype)
    forward, held = sampler.forward, [0]
    assert isinstance(forward, DecoderForward)
    products = [forward.head, *(product for block in forward.blocks for product in block.products)]
    own = {parameter.data_ptr() for parameter in model.parameters()}
    tensors = [
        tensor for product in products if product is not None for tensor in product.tensors if tensor is not None
    ]
    copies = [tensor for tensor in tensors if tensor.is_mkldnn or tensor.data_ptr() not in own]
    copied = sum(tensor.numel() * tensor.element_size() for tensor in copies) / 2**20
    begin = KVCache.begin_step

    def watched(cache: KVCache) -> None:
        begin(cache)
        held.append(sum(buffer.nbytes for buffer in (*cache.prefix, *cache.suffix)))

    with mock.patch.object(KVCache, "begin_step", watched), peak_since() as peak:
        params = SamplingParams(max_tokens=options.max_tokens, seed=1)
        by_sampler(sampler, prompts, options.group, params)
        highest = peak() - before
    weights, kept = sum(parameter.nbytes for parameter in model.parameters()) / 2**20, max(held) / 2**20
    known = weights + copied + kept
    print(
        f"weights {weights:.0f} MiB, their copy {copied:.0f}, keys and values {kept:.0f}, everything else "
        f"{highest - copied - kept:.0f}: the peak is {(weights + highest) / known - 1:.0%} above what must be held"
    )


def report(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> None:
    completions = options.prompts * options.group
    generate = min((side["seconds"] for name, side in found.items() if name.startswith("generate")), default=None)
    print(f"{'side':18}{'seconds':>9}{'completions/s':>15}{'tokens/s':>10}{'vs generate':>13}")
    for name, side in found.items():
        side["completions_per_second"] = completions / side["seconds"]
        side["ratio"] = generate / side["seconds"] if generate else float("nan")
        print(
            f"{name:18}{side['seconds']:9.2f}{side['completions_per_second']:15.1f}"
            f"{side['tokens'] / side['seconds']:10.0f}{side['ratio']:12.2f}x"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__, "peak_gib": round(peak, 2)}
    print(json.dumps({"options": vars(options), "machine": machine, "sides": found}))


if __name__ == "__main__":
    main()
