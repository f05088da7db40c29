"""The most used families of decoders, small, with the vocabulary, context, window and pattern of layers that were published.

`python tests/rollout/families.py` prints the table of docs/models.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from covey.errors import ConfigError, Unsupported
from covey.learner.policy import Policy
from covey.rollout import NativeSampler
from covey.rollout.decoder import DecoderForward
from kit import tiny_tokenizer

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 4}
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"head_dim": 8, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STATE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_n_groups": 1}
STATE |= {"mamba_expand": 2, "mamba_chunk_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


@dataclass(frozen=True)
class Family:
    """One family: its classes in transformers, and what sets a published model of it apart."""

    prefix: str
    """Of the names of its config and model."""
    vocabulary: int
    context: int
    model: str
    """The published model that the numbers are of."""
    window: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        given: dict[str, Any] = {**SMALL, "vocab_size": self.vocabulary, "max_position_embeddings": self.context}
        given |= {} if self.window is None else {"sliding_window": self.window}
        config = getattr(transformers, f"{self.prefix}Config")(**(given | self.options))
        torch.manual_seed(0)
        name = self.prefix.removesuffix("Text") + "ForCausalLM"
        model = getattr(transformers, name)(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # some experts are left as they were allocated
                if parameter.ndim == 3 or not bool(torch.isfinite(parameter).all()):
                    parameter.normal_(0, 0.1)
        return model


FAMILIES = {
    "Qwen2.5": Family("Qwen2", 151936, 32768, "Qwen2.5-0.5B", options={"use_sliding_window": False}),
    "Qwen3": Family("Qwen3", 151936, 40960, "Qwen3-0.6B"),
    "Qwen3-MoE": Family("Qwen3Moe", 151936, 40960, "Qwen3-30B-A3B", options=EXPERTS),
    "Qwen3.5": Family("Qwen3_5Text", 248320, 262144, "Qwen3.5-27B", options={**DELTA, "num_hidden_layers": 4}),
    "Llama 3": Family(
        "Llama", 128256, 131072, "Llama-3.1-8B",
        options={"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}},
    ),
    "Llama 4": Family(
        "Llama4Text", 202048, 10485760, "Llama-4-Scout", 8192,
        options={**EXPERTS, "attention_chunk_size": 8192, "num_hidden_layers": 4, "intermediate_size_mlp": 48},
    ),
    "Gemma 2": Family("Gemma2", 256000, 8192, "gemma-2-2b", 4096, {"query_pre_attn_scalar": 16}),
    "Gemma 3": Family("Gemma3Text", 262144, 32768, "gemma-3-1b", 512, {"num_hidden_layers": 6}),
    "Gemma 4": Family(
        "Gemma4Text", 262144, 131072, "gemma-4-e2b", 512,
        {"num_hidden_layers": 6, "global_head_dim": 16, "hidden_size_per_layer_input": 8},
    ),
    "Mistral 0.1": Family("Mistral", 32000, 32768, "Mistral-7B-v0.1", 4096),
    "Mistral 0.3": Family("Mistral", 32768, 32768, "Mistral-7B-v0.3", options={"sliding_window": None}),
    "Mixtral": Family("Mixtral", 32000, 32768, "Mixtral-8x7B", options={**EXPERTS, "sliding_window": None}),
    "Phi-3": Family("Phi3", 32064, 4096, "Phi-3-mini-4k", 2047),
    "Phi-4": Family("Phi3", 100352, 16384, "phi-4", options={"sliding_window": None}),
    "gpt-oss": Family("GptOss", 201088, 131072, "gpt-oss-20b", 128, EXPERTS),
    "GLM-4": Family("Glm4", 151552, 32768, "GLM-4-9B-0414"),
    "GLM-4.5": Family("Glm4Moe", 151552, 131072, "GLM-4.5-Air", options={**EXPERTS, "n_group": 1, "topk_group": 1}),
    "DeepSeek V2": Family("DeepseekV2", 102400, 163840, "DeepSeek-V2-Lite", options={**EXPERTS, **LATENT}),
    "DeepSeek V3": Family("DeepseekV3", 129280, 163840, "DeepSeek-V3", options={**EXPERTS, **LATENT}),
    "OLMo 2": Family("Olmo2", 100352, 4096, "OLMo-2-7B"),
    "OLMo 3": Family("Olmo3", 100278, 65536, "Olmo-3-7B", 4096, {"num_hidden_layers": 4}),
    "SmolLM3": Family("SmolLM3", 128256, 65536, "SmolLM3-3B", options={"num_hidden_layers": 4}),
    "Granite 3": Family("Granite", 49159, 131072, "granite-3.3-2b"),
    "Granite 4": Family(
        "GraniteMoeHybrid", 100352, 131072, "granite-4.0-h",
        options={**EXPERTS, **STATE, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"]},
    ),
    "LFM2": Family("Lfm2", 65536, 128000, "LFM2-350M", options={"layer_types": ["conv", "full_attention"]}),
    "Falcon-H1": Family("FalconH1", 32784, 16384, "Falcon-H1-0.5B", options=STATE),
}  # fmt: skip


def rollouts_of(model: Any) -> tuple[str, str]:
    """How completions are computed, and the reason where it is not by the fastest way."""
    try:
        sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32")
    except Unsupported as reason:
        return "fallback", str(reason)
    return ("native", "") if isinstance(sampler.forward, DecoderForward) else ("modules", "")


def reason_against_sharing(model: Any) -> str:
    """The reason why a prompt is computed once a completion in the learner; "" where it is not."""
    try:
        Policy(model, pad_id=0, shared_attention="sdpa").shares_prompts()
    except ConfigError as error:
        found = re.search("once a completion: (.*); leave it out", str(error))
        assert found
        return found[1]
    return ""


def row_of(name: str, model: Any) -> str:
    """The family's line of the table."""
    family = FAMILIES[name]
    how, why = rollouts_of(model)
    against = reason_against_sharing(model)
    window = "" if family.window is None else f"{family.window:,}"
    numbers = f"{family.vocabulary:,} | {family.context:,} | {window}"
    return f"| {name} | {family.model} | {numbers} | {how}{': ' if why else ''}{why} | {f'no: {against}' if against else 'yes'} |"


def table() -> str:
    head = "| family | numbers of | vocabulary | context | window | rollout | prompt shared while learning |"
    rows = [row_of(name, family.build()) for name, family in FAMILIES.items()]
    return "\n".join([head, "|---|---|--:|--:|--:|---|---|", *rows])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
