"""Small models with experts, random weights, and adapters on the experts that change what the model says."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 512},
    **{
        "num_experts": 8,
        "num_local_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": True},
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"head_dim": 8, "num_key_value_heads": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "GptOss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "DeepseekV3": LATENT,
    "GraniteMoe": {"router_aux_loss_coef": 0.01},
}
"""Options of the four families, of which DeepSeek's first layer is dense."""
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3Moe", {"mlp_only_layers": [0, 1]}),
    "DeepSeek-V3": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 2}),
}
"""Models of classes with experts that have none."""


def expert_model(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model whose experts and routers differ enough for a wrong choice to be seen."""
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES.get(family, {}), **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 or ".gate.weight" in name or ".router." in name:
                parameter.normal_(0, 0.3 if parameter.ndim == 3 else 1.0)
    return model.to(dtype)


def with_adapted_experts(model: Any, rank: int = 4, seed: int = 1, **options: Any) -> Any:
    """The model with LoRA on its experts, whose factors are random."""
    import peft

    from covey.adapters import expert_parameters

    adapter = {"target_modules": [], "target_parameters": expert_parameters(model), **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, **adapter))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return adapted
