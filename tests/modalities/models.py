"""Tiny vision-language models with real processors: with a patch grid (Qwen2.5-VL, Qwen3.5) and without (Idefics3, LLaVA, Gemma 3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageDraw

from covey.models.modalities import without_video
from kit import tiny_tokenizer

SPECIAL = [
    *("<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<fake_token_around_image>", "<global-img>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
]

GRID = ("qwen2_5_vl", "qwen3_5")
"""Kinds with one processor."""
PLACEHOLDER = {
    **dict.fromkeys(GRID, "<|vision_start|><|image_pad|><|vision_end|>"),
    "idefics3": "<image>",
    "llava": "<image>",
    "gemma3": "<start_of_image>",
}
SEEING = tuple(PLACEHOLDER)
KINDS = tuple(kind for kind in SEEING if kind != "qwen3_5")
"""A kind of each processor."""


def template(kind: str) -> str:
    """ChatML whose contents may be parts."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + PLACEHOLDER[kind] + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _tokenizer(kind: str, base: Any = None) -> Any:
    tokenizer = base or tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template(kind) if base is None else base.chat_template
    named = {**dict.fromkeys(GRID, "<|image_pad|>"), "gemma3": "<image_soft_token>"}.get(kind, "<image>")
    if kind == "gemma3":
        tokenizer.boi_token, tokenizer.eoi_token = "<start_of_image>", "<end_of_image>"
        tokenizer.boi_token_id = tokenizer.convert_tokens_to_ids("<start_of_image>")
    tokenizer.image_token, tokenizer.image_token_id = named, tokenizer.convert_tokens_to_ids(named)
    return tokenizer


def tiny_processor(kind: str, base: Any = None) -> Any:
    """A processor of the kind whose images are a few tokens each. Skips the test where it cannot be had without torchvision."""
    try:
        return _tiny_processor(kind, base)
    except ImportError as error:  # Idefics 3 under transformers 5.17
        pytest.skip(str(error).strip().splitlines()[0])


def _tiny_processor(kind: str, base: Any) -> Any:
    tokenizer = _tokenizer(kind, base)
    chat: dict[str, Any] = {"chat_template": tokenizer.chat_template}
    if kind in GRID:
        images = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
        return without_video(transformers.Qwen2_5_VLProcessor)(images, tokenizer, **chat)
    if kind == "idefics3":
        size = {"longest_edge": 32}
        images = transformers.Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, **chat)
    if kind == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=24)
        return transformers.LlavaProcessor(
            images,
            tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            **chat,
        )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, **chat)


def tiny_vlm(kind: str, *, seed: int = 0, layers: int = 2, hidden: int = 32, base: Any = None) -> tuple[Any, Any]:
    """(model in eval mode, processor), random weights. `base`: a tokenizer with a chat template of its own."""
    torch.manual_seed(seed)
    processor = tiny_processor(kind, base)
    tokenizer = processor.tokenizer
    ids = tokenizer.convert_tokens_to_ids
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "qwen2_5_vl":
        half = hidden // 4  # of a head's size
        sections = [half // 4, 3 * half // 8, 3 * half // 8]
        rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
        vision |= {"out_hidden_size": hidden, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}
        config: Any = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=vision, image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"), vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"), **ends,
        )  # fmt: skip
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
    elif kind == "qwen3_5":
        model = transformers.Qwen3_5ForConditionalGeneration(_hybrid_config(text, hidden, ids, ends))
    elif kind == "idefics3":
        vision = {**small, "image_size": 32, "patch_size": 8}
        config = transformers.Idefics3Config(
            text_config={**text, "model_type": "llama"}, vision_config=vision, scale_factor=2,
            image_token_id=ids("<image>"), **ends,
        )  # fmt: skip
        model = transformers.Idefics3ForConditionalGeneration(config)
    elif kind == "llava":
        vision = {**small, "image_size": 24, "patch_size": 8, "projection_dim": 16, "model_type": "clip_vision_model"}
        config = transformers.LlavaConfig(
            text_config={**text, "model_type": "llama"}, vision_config=vision, image_token_index=ids("<image>"),
            image_seq_length=9, vision_feature_layer=-1, **ends,
        )  # fmt: skip
        model = transformers.LlavaForConditionalGeneration(config)
    else:
        vision = {
            **small,
            "image_size": 16,
            "patch_size": 4,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        }
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        config = transformers.Gemma3Config(
            text_config={**text, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "layer_types": kinds},
            vision_config=vision, mm_tokens_per_image=4, image_token_index=ids("<image_soft_token>"),
            boi_token_index=ids("<start_of_image>"), eoi_token_index=ids("<end_of_image>"), **ends,
        )  # fmt: skip
        model = transformers.Gemma3ForConditionalGeneration(config)
    for parameter in model.parameters():  # default initialization leaves images nearly without effect
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval(), processor


def picture(count: int, size: tuple[int, int] = (40, 32), seed: int = 0) -> Image.Image:
    """White squares on black."""
    image = Image.new("RGB", size)
    draw = ImageDraw.Draw(image)
    for i in range(count):
        x, y = (7 * i + 5 * seed) % (size[0] - 6), (11 * i + 3 * seed) % (size[1] - 6)
        draw.rectangle([x, y, x + 4, y + 4], fill=(255, 200 - 20 * i, 40 * seed % 255))
    return image


def _hybrid_config(text: dict[str, Any], hidden: int, ids: Any, ends: dict[str, Any]) -> Any:
    """Qwen3.5's: gated delta nets and one layer of attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [hidden // 32, hidden // 32, 0], "mrope_interleaved": True}
    delta = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    delta |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")} | {"linear_conv_kernel_dim": 4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    vision |= {
        "out_hidden_size": hidden,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
    }
    return transformers.Qwen3_5Config(
        text_config={**text, **delta, "num_hidden_layers": 4, "head_dim": hidden // 2, "rope_parameters": rope},
        vision_config=vision, image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"), **ends,
    )  # fmt: skip
