"""Models with experts, as vLLM in this process draws from them: `python recorded_experts.py FOLDER`, by a Python that has vLLM."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.learner.packing import unscored_row
from covey.learner.policy import Policy
from covey.rollout import SamplingParams
from covey.rollout.turns import TurnSampler
from covey.rollout.vllm import VLLMSampler
from covey.types import Group, Prompt
from expert_models import expert_model
from kit import tiny_tokenizer

DENSE_FIRST = {"num_hidden_layers": 3, "mlp_only_layers": [0]}
LONG = tuple(3 + 7 * i % 50 for i in range(300))
"""Of several blocks of the prefix cache, which hold 128 tokens each on a CPU."""
PROMPTS = [Prompt(uid=str(len(ids)), token_ids=tuple(ids)) for ids in ([7], range(5, 20), LONG)]


def model_of(family: str, **options: Any) -> Any:
    sizes = {"vocab_size": len(tiny_tokenizer()), "head_dim": 32, "hidden_size": 64, "moe_intermediate_size": 32}
    return expert_model(family, **{**sizes, **options})


@torch.no_grad()
def gaps(model: Any, groups: list[Group]) -> dict[str, float]:
    """Share of choices that are not those of a plain forward, and the largest difference of its log-probabilities."""
    pairs = [(unscored_row(group.prompt, one, i), one) for i, group in enumerate(groups) for one in group.completions]
    measured = Policy(model, pad_id=0, replays_experts=True).measure([row for row, _ in pairs])
    apart = [
        (mine[: one.num_tokens] - one.logprobs)[one.written].abs().max()
        for mine, (_, one) in zip(measured.logp, pairs, strict=True)
    ]
    return {"changed": float(measured.routing["experts/changed"]), "gap": float(max(apart))}


def moved(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def drawn_by(family: str, **options: Any) -> dict[str, Any]:
    """Gaps of the first draw, of one from its cache, after an update, of stop strings, and of several turns; and the recorded layers."""
    tokenizer, model = tiny_tokenizer(), model_of(family, **options)
    sampler = VLLMSampler(model, tokenizer, records_experts=True, max_model_length=512)
    draw = lambda over=sampler, **more: gaps(
        model, list(over.sample(PROMPTS, 3, SamplingParams(**{"max_tokens": 12, "seed": 0, **more})))
    )
    found = {"first": draw(), "cached": draw(seed=1)}
    moved(model)
    sampler.load(model, 1)
    found |= {"updated": draw(), "greedy": draw(temperature=0.0), "stop": draw(stop=("a", "e"))}
    sampler.eos_ids = tuple(range(2, 22))
    reply = lambda turns: [[9, 10, 11, 12, 13] if len(turn.token_ids) < 14 else None for turn in turns]
    turns = TurnSampler(sampler, reply, tokenizer, 512)
    return {"layers": sampler.layers, **found, "turns": draw(turns, max_tokens=24)}


def run_of(model: Any, folder: Path, **options: Any) -> GRPOTrainer:
    """A run that replays the experts of vLLM."""
    arguments: dict[str, Any] = {
        **{"output_dir": str(folder), "max_steps": 3, "learning_rate": 1e-2, "bf16": False, "save_strategy": "no"},
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "logging_steps": 1},
        **{"use_vllm": True, "router_replay": "R3", "report_to": "none", "use_cpu": True, **options},
    }
    return GRPOTrainer(
        model=model,
        processing_class=tiny_tokenizer(),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": ["Tom has 3 apples", "What is 12"]}),
    )


def shares_in(run: GRPOTrainer) -> list[float]:
    """`experts/changed` of each step."""
    return [line["experts/changed"] for line in run.state.log_history if "experts/changed" in line]


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {"Qwen3Moe": drawn_by("Qwen3Moe", **DENSE_FIRST), "Mixtral": drawn_by("Mixtral")}
    colocated = {"vllm_mode": "colocate", "vllm_max_model_length": 256}
    trained = run_of(model_of("Qwen3Moe", **DENSE_FIRST), Path(sys.argv[1]), **colocated)
    trained.train()
    print("RESULT", json.dumps({**results, "run": shares_in(trained)}), flush=True)  # noqa: T201 - read by the test
