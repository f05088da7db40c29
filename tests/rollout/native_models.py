"""Small models of the families that the native engine writes out."""

import torch
import transformers

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NATIVE = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 3.0}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoX", {}),
    "granite": ("Granite", {}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "olmoe": ("Olmoe", EXPERTS),
}


def build(name, options, seed=0):
    config = getattr(transformers, f"{name}Config")(**(SHAPE | options))
    torch.manual_seed(seed)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, name + head)(config).float().eval()
