"""Every causal class of transformers, small: `build(kind)` by its kind in the configuration."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_WIDTH = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "emb_dim", "dim", "lru_width")
_INNER = (
    "intermediate_size",
    "ffn_dim",
    "d_ff",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
    "n_inner",
    "intermediate_size_mlp",
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "num_key_value_heads", "decoder_attention_heads")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "context_length")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SMALL: dict[str, Any] = {
    **dict.fromkeys((*_WIDTH, "attention_hidden_size"), 32), **dict.fromkeys(_INNER, 48), **dict.fromkeys(_LAYERS, 3),
    **dict.fromkeys(_HEADS, 2), **dict.fromkeys(_CONTEXT, 256), **dict.fromkeys(_EXPERTS, 4),
    "vocab_size": 320, "head_dim": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "rotary_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16,
    "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_head_dim": 16, "mamba_num_heads": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 2, "state_size": 8, "expand": 2, "n_groups": 1, "chunk_size": 16, "ssm_state_size": 8, "dropout": 0.0, "is_decoder": True,
}  # fmt: skip
WITH_STATES = (
    "qwen3_5_text", "recurrent_gemma", "falcon_h1", "lfm2", "granitemoehybrid", "mamba", "mamba2", "nemotron_h", "jamba",
    "minimax", "bamba", "olmo_hybrid", "qwen3_next", "qwen3_5_moe_text", "falcon_mamba", "lfm2_moe", "lfm3",
    "bailing_hybrid", "kimi_linear", "zamba", "zamba2",
)  # fmt: skip
"""Gated delta nets, RG-LRU (whose states lie on modules), Mamba beside attention, short convolutions, Mamba2, Mamba, lightning attention, one attention for several layers."""
MOST = 30_000_000
LINEAR, FULL = "linear_attention", "full_attention"
_BOTH = {"layer_types": [LINEAR, FULL, LINEAR]}
_CHOOSING = {"head_dim": 8, "q_lora_rank": 16, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 16}
INDEXED: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "axk2": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full"]},
    "hy_v4": {"indexer_types": ["full", "full", "shared"]},
    "dots3_note_text": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "head_dim": 24,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 8,
        "shared_experts_intermediate_size": 16,
        "per_layer_config": {
            1: {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 24,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "kv_lora_rank": 24,
                "q_lora_rank": 24,
            }
        },
    },
}
"""Kinds whose indexers choose keys. Here they choose four, in some layers those of the layer before."""
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 4},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", FULL, "conv"]},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "bailing_hybrid": {"layer_group_size": 2},
    "codegen": {"num_attention_heads": 4, "n_head": 4},
    "deepseek_v3": {"head_dim": 8},
    **{kind: {"head_dim": 8} for kind in ("youtu", "longcat_flash", "axk1")},
    "zaya": {"num_experts_per_tok": 1},
    "mimo_v2_flash": {"head_dim": 24, "num_attention_heads": 4},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    **{kind: {"unpadded_vocab_size": 320} for kind in ("inkling2_text", "inkling2_loop_text")},
    "xlstm": {"hidden_size": 128},
    "qwen4_exp_text": {
        "layer_types": [LINEAR, "indexed_attention", LINEAR],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "heads_per_ngram": 2,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "sliding_attention", FULL],
    },
    **{kind: {**_CHOOSING, **more} for kind, more in INDEXED.items()},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse", FULL],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", FULL, "sliding_attention", FULL],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense"] * 3},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "feature_size": 16},
    "reformer": {
        "attn_layers": ["local", "lsh", "local"],
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
        "num_buckets": 4,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 32,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
    },
    "blt": {"encoder_hash_byte_group_vocab": 64, "cross_attn_k": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "emu3": {"bos_token_id": 1},
    "emu3_text_model": {"bos_token_id": 1},
    "mllama_text_model": {"bos_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "zamba2": {
        "mamba_expand": 2,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "num_hidden_layers": 4,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 32,
    },
    **dict.fromkeys(("granitemoehybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "kimi_linear"), _BOTH),
}
"""Sizes of some kinds, where both sorts of layers occur and numbers have to match."""


PARTS = (
    *("text_config", "vision_config", "audio_config"),
    *("patcher_config", "encoder_config", "decoder_config", "global_config"),
)
"""Configurations inside the one of a model, of media or of its stages."""
_DROPPED = 8


def small_sizes(kind: str, known: Any) -> dict[str, Any]:
    """The sizes of `SMALL` that a configuration has, those of its parts included, and those of `OWN`."""
    sizes = {name: value for name, value in SMALL.items() if _has(known, name)}
    for part in PARTS:
        inner = getattr(known, part, None)
        if hasattr(inner, "to_dict"):
            sizes[part] = small_sizes(inner.model_type, inner)
    return {**sizes, **OWN.get(kind, {})}


def _has(known: Any, name: str) -> bool:
    try:
        return hasattr(known, name) and not isinstance(getattr(type(known), name, None), property)
    except Exception:  # noqa: BLE001 - a size that varies from layer to layer
        return False


def configured(kind: str) -> Any:
    """The small configuration of a kind. A size that it refuses, and names, is left at its default."""
    config_class = CONFIG_MAPPING[kind]
    sizes = small_sizes(kind, config_class())
    for _ in range(_DROPPED):
        try:
            config = config_class(**sizes)
            with torch.device("meta"):  # counted before memory is taken: some sizes have names of their own
                shape = AutoModelForCausalLM.from_config(config)
        except Exception as error:
            named = [name for name in re.findall(r"'(\w+)'|`(\w+)`", str(error)) for name in name if name in sizes]
            if not named:
                raise
            del sizes[named[0]]
        else:
            if (count := sum(parameter.numel() for parameter in shape.parameters())) > MOST:
                raise ValueError(f"{count:,} parameters, where {MOST:,} are small")
            return config
    raise ValueError("its configuration refuses too many sizes")


def build(kind: str) -> Any:
    """A model of this kind with random weights, in eval mode. Raises what its configuration raises at these sizes."""
    config = configured(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 3 or not bool(torch.isfinite(parameter).all()):  # left as they were allocated
                    parameter.normal_(0, 0.1)
                elif parameter.ndim >= 2:
                    parameter.mul_(3)
            if kind in INDEXED:  # the padding token's embedding is zeros, for which all keys have one score
                model.get_input_embeddings().weight[0].normal_(0, 0.1)
    return model
