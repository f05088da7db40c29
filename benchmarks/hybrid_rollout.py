"""Rollouts of models whose layers keep a state, by the native engine and by transformers' `generate`, in processor time.

    OMP_NUM_THREADS=1 python benchmarks/hybrid_rollout.py [tokens of a completion]

16 prompts of 195 to 205 tokens, 8 completions each, all of one length, so that `generate` computes no row that has ended.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from covey.kernels import training_heap
from covey.rollout import NativeSampler, SamplingParams
from covey.types import Prompt

SIZES = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
THREE = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {f"linear_{name}": 4 for name in ("num_key_heads", "num_value_heads")}
DELTA |= {f"linear_{name}": 64 for name in ("key_head_dim", "value_head_dim")}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2}
DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 768}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**DELTA, "layer_types": THREE}),
    "Granite 4": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**MAMBA, **DENSE, "layer_types": THREE}),
    "Falcon-H1": ("FalconH1Config", "FalconH1ForCausalLM", {**MAMBA, "mamba_d_ssm": 512}),
    "Bamba": ("BambaConfig", "BambaForCausalLM", {**MAMBA, "attn_layer_indices": [3]}),
    "Mamba 2": ("Mamba2Config", "Mamba2ForCausalLM", {"num_heads": 8, "state_size": 64, "n_groups": 1, "expand": 2}),
    "RecurrentGemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {"lru_width": 256, "block_types": ["recurrent", "recurrent", "attention"]},
    ),
    "LFM2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
}
PROMPTS, SAMPLES = 16, 8


def main(tokens: int) -> None:
    training_heap(returns_blocks=False)  # as in a run
    draws = random.Random(0)
    prompts = [
        Prompt(uid=str(i), token_ids=tuple(draws.randrange(3, 8000) for _ in range(195 + i % 11)))
        for i in range(PROMPTS)
    ]
    for name, (config, model_class, options) in FAMILIES.items():
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(getattr(transformers, config)(**{**SIZES, **options})).float().eval()
        ours, theirs = _native(model, prompts, tokens), _generate(model, prompts, tokens)
        sys.stdout.write(f"{name}: native {ours:.2f} s, generate {theirs:.2f} s, ratio {theirs / ours:.1f}\n")


def _native(model: Any, prompts: list[Prompt], tokens: int) -> float:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    sampler = NativeSampler(model, tokenizer, dtype="float32", eos_ids=[])
    start = time.process_time()
    list(sampler.sample(prompts, SAMPLES, SamplingParams(max_tokens=tokens, seed=1)))
    return time.process_time() - start


def _generate(model: Any, prompts: list[Prompt], tokens: int) -> float:
    width = max(len(prompt.token_ids) for prompt in prompts)
    rows = [prompt.token_ids for prompt in prompts for _ in range(SAMPLES)]
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    start = time.process_time()
    with torch.no_grad():
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens)
    return time.process_time() - start


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
