"""Whole optimizer steps of a GRPOTrainer on completions that are given, as numbers: the same file asks TRL and Covey.

`python tests/parity/whole_steps.py` asks TRL, where it is installed, and writes `tests/data/trl_steps.json` (`make record-trl`).
"""

import json
import os
import random
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

TESTS = Path(__file__).parents[1]
MODEL = TESTS.parent / "src" / "covey" / "demo" / "model"
GOLDEN = TESTS / "data" / "trl_steps.json"
PROMPTS = [f"{i} apples and {3 * i} pears for Tom and his mother."[: 6 + i % 17] for i in range(16)]
LENGTH = 8
COMMON = {
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": LENGTH, "num_iterations": 2, "max_steps": 4,
    "learning_rate": 5e-4, "adam_epsilon": 1e-3, "logging_steps": 1, "lr_scheduler_type": "constant", "seed": 7, "report_to": "none",
    "save_strategy": "no", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
}  # fmt: skip
"""Each completion is trained on twice, so that the second time it is off-policy."""
CORRECTED = {"vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 1.3}
CASES: dict[str, dict[str, Any]] = {
    "grpo, every mask": {
        "loss_type": "grpo", "beta": 0.1, "off_policy_mask_threshold": 0.02, "top_entropy_quantile": 0.4, "temperature": 0.7,
        "mask_truncated_completions": True, "delta": 1.3, "scale_rewards": "batch", "reward_weights": [0.7, -1.5],
    },
    "dapo, entropy and schedule": {
        "entropy_coef": 0.05, "top_entropy_quantile": 0.6, "epsilon_high": 0.28, "weight_decay": 0.3, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "adam_beta1": 0.5,
    },
    "cispo, normalize_then_sum": {
        "loss_type": "cispo", "epsilon_high": 1.05, "importance_sampling_level": "sequence",
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.5},
    "vespo, tokens truncated": {  # phi multiplies the rounding of a summed log-ratio by k - lambda w, w up to 1.3^8: so small ones
        "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate", "vespo_k_pos": 0.8, "vespo_lambda_pos": 1.0,
        "vespo_k_neg": 1.0, "vespo_lambda_neg": 0.7, **CORRECTED,
    },
    "luspo, moving reference": {
        "loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.2, "sync_ref_model": True,
        "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3, "use_bias_correction_kl": True,
    },
    "bnpo, adaptive entropy": {"loss_type": "bnpo", "use_adaptive_entropy": True, "entropy_target": 6.0, "entropy_coef": 0.01},
    "dr_grpo, sequences masked": {"loss_type": "dr_grpo", "vllm_importance_sampling_mode": "sequence_mask", **CORRECTED},
}  # fmt: skip
OTHERWISE = ("num_tokens", "entropy_coef", "time", "runtime", "per_second", "flos")
"""Metrics that differ on purpose (docs/from-trl.md), or are a machine's."""


def hashed(completion_ids: Any, **columns: Any) -> list[float]:
    return [sum(ids) * 37 % 101 / 50 - 1 for ids in completion_ids]


def sometimes(completion_ids: Any, **columns: Any) -> list[float | None]:
    return [None if sum(ids) % 3 == 0 else sum(ids) % 7 / 3 for ids in completion_ids]


class Writer:
    """`rollout_func` whose completions follow from the prompt and from how often it came; `noise` nats off the model's log-probabilities."""

    def __init__(self, tokenizer: Any, model: Any, noise: float | None) -> None:
        self.tokenizer, self.model, self.noise, self.asked = tokenizer, model, noise, dict[str, int]()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        rows = [self._row(prompt) for prompt in prompts]
        logprobs = None if self.noise is None else [row[2] for row in rows]
        return {
            "prompt_ids": [row[0] for row in rows],
            "completion_ids": [row[1] for row in rows],
            "logprobs": logprobs,
        }

    def _row(self, prompt: str) -> tuple[list[int], list[int], list[float]]:
        number = self.asked[prompt] = self.asked.get(prompt, 0) + 1
        chance, eos = random.Random(f"{prompt}{number}"), self.tokenizer.eos_token_id
        words = [i for i in range(len(self.tokenizer)) if i not in (eos, self.tokenizer.pad_token_id)]
        count = chance.randint(1, LENGTH)
        drawn = [chance.choice(words) for _ in range(count)]
        if count < LENGTH or chance.random() < 0.5:
            drawn[-1] = eos
        read = self.tokenizer(prompt)["input_ids"]
        if self.noise is None:
            return read, drawn, []
        with torch.no_grad():
            logits = self.model(torch.tensor([read + drawn])).logits[0, len(read) - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, torch.tensor(drawn)[:, None])[:, 0].tolist()
        return read, drawn, [x + self.noise * chance.gauss(0, 1) for x in logp]


def steps(lib: Any, name: str) -> dict[str, Any]:
    """Metrics of every step, and of each weight the dot product of its change with a fixed vector."""
    options, tokenizer = CASES[name], AutoTokenizer.from_pretrained(MODEL)
    load = lambda: AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    is_corrected = "vllm_importance_sampling_mode" in options
    if lib.__name__ == "covey" and not is_corrected:
        options = {**options, "vllm_importance_sampling_correction": False}  # TRL's are `use_vllm` only
    start = load()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lib.GRPOTrainer(
            load(),
            [hashed, sometimes],
            lib.GRPOConfig(output_dir=f"{folder}/run", **{**COMMON, **options}),
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            rollout_func=Writer(tokenizer, start, 0.3 if is_corrected else None),
        )
        if lib.__name__ == "trl" and is_corrected:
            trainer.use_vllm, trainer._last_loaded_step = True, -1
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    metrics = [{k: v for k, v in entry.items() if not any(word in k for word in OTHERWISE)} for entry in logs]
    weights = dict(trainer.model.named_parameters())
    moved = {name: _probed(weights[name].detach() - old.detach()) for name, old in start.named_parameters()}
    return {"metrics": metrics, "moved": moved}


def _probed(change: torch.Tensor) -> float:
    change = change.double().flatten()
    return float(change @ torch.arange(1, len(change) + 1, dtype=torch.float64).cos())


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import trl

    source = f"TRL {version('trl')}, transformers {version('transformers')}, torch {version('torch')}"
    cases = {name: steps(trl, name) for name in CASES}
    GOLDEN.write_text(json.dumps({"source": source, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
