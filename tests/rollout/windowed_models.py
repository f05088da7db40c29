"""Small models of the families whose layers see a window of the past."""

import torch
import transformers
from native_models import EXPERTS, SHAPE

ALL_EXPERTS = EXPERTS | {"num_experts_per_tok": 4}  # a choice among nearly equal ones would hang on rounding
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EVERY_HEAD = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LOCAL = {
    "mistral": ("Mistral", {"sliding_window": 12}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {"sliding_window": 12, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {"sliding_window": 12, "num_hidden_layers": 6, "query_pre_attn_scalar": 8}),
    "llama4": ("Llama4Text", {**ALL_EXPERTS, "attention_chunk_size": 12, "num_hidden_layers": 4}),
    "gpt_oss": ("GptOss", {**ALL_EXPERTS, "sliding_window": 12}),
    "deepseek_v3": ("DeepseekV3", {**ALL_EXPERTS, **LATENT, **EVERY_HEAD}),
    "afmoe": ("Afmoe", {**ALL_EXPERTS, "sliding_window": 12, "num_dense_layers": 1}),
}
"""One of each kind: every layer, some layers, capped scores, two rotations, chunks, sinks, values narrower than keys, and a
layer that takes a view of what its attention returns."""
PROMPTS = [list(range(5, 5 + length)) for length in (3, 1, 40, 11, 12, 13, 25)]


def build(arch, **more):
    name, options = LOCAL[arch]
    config = getattr(transformers, f"{name}Config")(**(SHAPE | options | more))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).float().eval()
    if arch == "gemma2":
        model.config._attn_implementation = "eager"  # SDPA of transformers before 5.23 leaves the cap out
    with torch.no_grad():
        for parameter in model.parameters():  # wide enough that a wrong key changes the next token; some are left unset
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.0)
    return model
