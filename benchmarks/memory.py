"""Peak memory: a learner's step over vocabulary and length, and what `--dry-run` predicts beside what a run takes.

    python benchmarks/memory.py                    # both tables
    python benchmarks/memory.py --only learner     # the grid of vocabularies and lengths
    python benchmarks/memory.py --only prediction --runs LoRA 60M

Every cell is a fresh process on the CPU; the peak is that of resident memory (VmHWM) above what the process held before the
model was loaded, so the C library's fragmentation counts. What Python and torch take themselves does not: before the model
is loaded, a tiny one trains for two steps with the same options, so that oneDNN and all else that loads on first use is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import torch
from resident import peak_since, resident

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.doctor.dry_run import dry_run
from covey.kernels.sampler_linear import has_bfloat16
from covey.learner import Policy
from covey.learner.memory_estimate import Memory
from covey.types import Completion, Group, Prompt
from learner import as_in_runs, learner_of

VOCABULARIES = (4_096, 32_000, 152_000)
LENGTHS = (128, 512, 1024, 2048, 4096)
RUNS: dict[str, dict[str, Any]] = {
    "10M, float32": {},
    "10M, bfloat16 products": {"bf16": True},
    "10M, float32, recomputed activations": {"gradient_checkpointing": True},
    "10M, float32, beta 0.04": {"beta": 0.04},
    "10M, float32, gradient accumulation 4 x 8": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    "10M, float32, few-shot prompts": {"shots": 4},
    "10M, float32, LoRA": {"lora": 16},
    "10M, float32, LoRA, beta 0.04, recomputed": {"lora": 16, "beta": 0.04, "gradient_checkpointing": True},
    "10M, float32, 1024 tokens a micro-batch": {"max_tokens_per_microbatch": 1024},
    "10M, float32, 8192 tokens a micro-batch": {"max_tokens_per_microbatch": 8192},
    "10M, float32, vocabulary of 152,000": {"vocabulary": 152_000},
    "10M, float32, vocabulary of 152,000, 8-bit optimizer": {"vocabulary": 152_000, "optim": "adamw_bnb_8bit"},
    "10M, bfloat16 products, vocabulary of 152,000": {"vocabulary": 152_000, "bf16": True},
    "60M, float32": {"size": "60m"},
    "60M, bfloat16 products": {"size": "60m", "bf16": True},
    "60M, float32, recomputed activations": {"size": "60m", "gradient_checkpointing": True},
    "60M, float32, beta 0.04, 1024 tokens a micro-batch": {
        "size": "60m",
        "beta": 0.04,
        "max_tokens_per_microbatch": 1024,
    },
    "60M, float32, 8-bit optimizer, recomputed": {
        "size": "60m",
        "optim": "adamw_bnb_8bit",
        "gradient_checkpointing": True,
    },
    "60M, float32, LoRA": {"size": "60m", "lora": 16},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("learner", "prediction"))
    parser.add_argument("--runs", nargs="+", help="only the predictions whose name holds one of these words")
    parser.add_argument("--cell", help="run one cell and print it as JSON; used by this script itself")
    given = parser.parse_args()
    if given.cell:
        sys.stdout.write(json.dumps(cell(json.loads(given.cell))) + "\n")
        return
    if given.only != "prediction":
        learner_table()
    if given.only != "learner":
        prediction_table(given.runs)


def in_a_process(what: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, __file__, "--cell", json.dumps(what)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def cell(what: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.nn.Linear(64, 64)(torch.randn(64, 64)).sum().backward()  # what torch loads on first use is not the model's
    if "make" in what:
        return {"parameters": model_of(what["make"])[0].num_parameters()}
    return learner_cell(**what["learner"]) if "learner" in what else run_cell(what["run"])


def model_of(size: str) -> tuple[Any, Any]:
    """The benchmark's model as it is initialized, and its tokenizer, which is trained on first use: memory of its own."""
    import rollout

    return rollout.trained(size, 0)


def learner_table() -> None:
    """MiB above weights, gradients and optimizer, for one group of 4 completions; behind it what their logits would take."""
    print("| vocabulary | " + " | ".join(f"{length} tokens" for length in LENGTHS) + " |")
    print("|--:|" + "--:|" * len(LENGTHS))
    for vocabulary in VOCABULARIES:
        cells = []
        for length in LENGTHS:
            above = in_a_process({"learner": {"vocabulary": vocabulary, "length": length}})["above"]
            cells.append(f"{above:.0f} ({4 * length * vocabulary * 4 / 2**20:,.0f})")
        print(f"| {vocabulary:,} | " + " | ".join(cells) + " |", flush=True)


def learner_cell(vocabulary: int, length: int) -> dict[str, float]:
    """Peak of one step of four completions of `length` tokens on a small model with this vocabulary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = Qwen2Config(
        **shape, num_key_value_heads=2, vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=8192
    )
    policy = Policy(Qwen2ForCausalLM(config), pad_id=0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    learner = learner_of(policy, optimizer, max_completion_length=length, **as_in_runs())
    learner.step(groups_of(8, vocabulary), alg.dapo(), 1)  # the optimizer's state exists from here on
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    before = resident("VmRSS")
    with peak_since() as peak:
        learner.step(groups_of(length, vocabulary), alg.dapo(), 2)
    return {"above": peak() - before - 4 * parameters / 2**20}  # the gradients are as large as the weights


def groups_of(length: int, vocabulary: int) -> list[Group]:
    draw = torch.Generator().manual_seed(0)
    answers = [
        Completion(token_ids=torch.randint(vocabulary, (length,), generator=draw), text="", finish="stop")
        for _ in range(4)
    ]
    prompt = Prompt(uid="0", token_ids=tuple(range(64)))
    return [replace(Group(prompt=prompt, completions=tuple(answers)), advantages=torch.linspace(-1, 1, 4))]


def prediction_table(words: list[str] | None) -> None:
    print("\n| run | predicted, MiB | measured, MiB | predicted / measured | process before the model, MiB |")
    print("|---|--:|--:|--:|--:|")
    for name, options in RUNS.items():
        if words and not any(word in name for word in words):
            continue
        if options.get("bf16") and not has_bfloat16(torch.device("cpu")):
            print(f"| {name} | this processor does not multiply bfloat16 | | | |", flush=True)
            continue
        in_a_process({"make": options.get("size", "10m")})
        found = in_a_process({"run": options})
        ratio = found["predicted"] / found["measured"]
        values = f"{found['predicted']:.0f} | {found['measured']:.0f} | {ratio:.2f} | {found['process']:.0f}"
        print(f"| {name} | {values} |", flush=True)


def run_cell(options: dict[str, Any]) -> dict[str, float]:
    """Two steps of 4 prompts x 8 completions that all reach their 200 tokens, and the prediction for the same options."""
    import rollout

    options = dict(options)
    size, rank = options.pop("size", "10m"), options.pop("lora", None)
    vocabulary, shots = options.pop("vocabulary", None), options.pop("shots", 0)
    prompts = rollout.questions(16, shots)
    warm_up(prompts, options, rank)
    with peak_since() as peak:
        before = resident("VmRSS")
        model, tokenizer = model_of(size)
        never_ends(tokenizer)
        model.resize_token_embeddings(max(vocabulary or 0, len(tokenizer)), mean_resizing=False)
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model_config = model.config
        args, lengths = trained(
            model, tokenizer, prompts, {"max_completion_length": 200, "max_steps": 2, **options}, rank
        )
        measured = peak() - before
    assert min(lengths) > 180, f"completions ended early: {lengths}"
    longest = max(len(tokenizer(text)["input_ids"]) for text in prompts)
    return {
        "predicted": predicted(model_config, args, longest, rank).peak / 2**20,
        "measured": measured,
        "process": before,
    }


def warm_up(prompts: list[str], options: dict[str, Any], rank: int | None) -> None:
    """Two steps of a tiny model with these options: the code that a run loads is not the model's memory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import rollout

    tokenizer = rollout.trained("10m", 0)[1]
    never_ends(tokenizer)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    eos = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    tiny = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **shape, **eos))
    dtype = "bfloat16" if has_bfloat16(tiny.device) else "auto"  # what a model that is not tiny is sampled in
    trained(
        tiny, tokenizer, prompts, {**options, "max_completion_length": 8, "max_steps": 2, "rollout_dtype": dtype}, rank
    )
    gc.collect()


def never_ends(tokenizer: Any) -> None:
    """A byte that no English text holds ends a completion, so that all reach the full length."""
    tokenizer.eos_token, tokenizer.pad_token_id = tokenizer.convert_ids_to_tokens(tokenizer("\x0e")["input_ids"][0]), 0


def trained(
    model: Any, tokenizer: Any, prompts: list[str], options: dict[str, Any], rank: int | None
) -> tuple[GRPOConfig, list[float]]:
    """What a run was configured to, and the mean length of its completions by step."""
    from datasets import Dataset

    given: dict[str, Any] = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    quiet: dict[str, Any] = {
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    with tempfile.TemporaryDirectory() as output:
        args = GRPOConfig(output_dir=output, **quiet, **{**given, **options})
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completion_ids, **columns: [float(sum(ids) % 97) for ids in completion_ids],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
            peft_config=adapter_of(rank),
        )
        trainer.train()
    name = "completions/mean_length"
    return args, [entry[name] for entry in trainer.state.log_history if name in entry]


def adapter_of(rank: int | None) -> Any:
    """LoRA of this rank on every linear layer but the output head, or None."""
    if rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def predicted(model_config: Any, args: GRPOConfig, prompt_tokens: int, rank: int | None) -> Memory:
    """What `--dry-run` says of these options, with the prompts counted in tokens."""
    return dry_run(args, model_config, peft_config=adapter_of(rank), prompts=4, prompt_tokens=prompt_tokens)


if __name__ == "__main__":
    main()
