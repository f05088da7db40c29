"""Tiny models that hear, with real processors: Qwen2-Audio, Qwen2.5-Omni's thinker (images too), Gemma 3n; and tones."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import is_timm_available

from covey.models.modalities import without_video
from kit import tiny_tokenizer

RATE = 16_000
SPECIAL = {
    "image": "<|IMAGE|>", "audio": "<|AUDIO|>", "video": "<|VIDEO|>", "vision_bos": "<|vision_bos|>",
    "vision_eos": "<|vision_eos|>", "audio_bos": "<|audio_bos|>", "audio_eos": "<|audio_eos|>",
    "boi": "<start_of_image>", "eoi": "<end_of_image>", "boa": "<start_of_audio>", "eoa": "<end_of_audio>",
}  # fmt: skip
KINDS = ("qwen2_audio", "qwen2_5_omni", "gemma3n")
_SIDE = 64
"""Pixels a side of an image that Gemma 3n's tower makes four tokens of."""
_WIDTH = 16
PLACES = {
    "qwen2_audio": {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
    "qwen2_5_omni": {
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    },
    "gemma3n": {"audio": "<|AUDIO|>", "image": "<|IMAGE|>"},
}


def template(kind: str) -> str:
    """ChatML whose contents may be parts."""
    branches = "".join(
        f"{{% {'el' * (i > 0)}if part['type'] == '{name}' %}}{place}"
        for i, (name, place) in enumerate(PLACES[kind].items())
    )
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        + branches
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _tokenizer(kind: str, base: Any) -> Any:
    tokenizer = base or tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL.values())})
    tokenizer.chat_template = template(kind) if base is None else base.chat_template
    for name, text in SPECIAL.items():
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
    return tokenizer


def tiny_hearing_processor(kind: str, base: Any = None) -> Any:
    """A processor of the kind that hears at most two seconds, as few tokens."""
    tokenizer = _tokenizer(kind, base)
    chat: dict[str, Any] = {"chat_template": tokenizer.chat_template}
    if kind == "gemma3n":
        images = transformers.SiglipImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
        hearing = transformers.Gemma3nAudioFeatureExtractor(feature_size=16, max_length=2 * RATE, min_frequency=0.0)
        return transformers.Gemma3nProcessor(
            hearing, images, tokenizer, audio_seq_length=14, image_seq_length=4, **chat
        )
    hearing = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    if kind == "qwen2_audio":
        return transformers.Qwen2AudioProcessor(hearing, tokenizer, **chat)
    if not hasattr(transformers.Qwen2_5OmniProcessor, "audio_kwargs"):
        pytest.skip(
            "Qwen2.5-Omni's processor of transformers 5.20 and older asks for its part for videos at every prompt"
        )
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    return without_video(transformers.Qwen2_5OmniProcessor)(
        image_processor=images, feature_extractor=hearing, tokenizer=tokenizer, **chat
    )


def tiny_hearing_model(kind: str, *, seed: int = 0, hidden: int = 32, base: Any = None) -> tuple[Any, Any]:
    """(model in eval mode, processor), random weights. `base`: a tokenizer with a chat template of its own."""
    torch.manual_seed(seed)
    processor = tiny_hearing_processor(kind, base)
    tokenizer = processor.tokenizer
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
    }  # fmt: skip
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    whisper = {
        "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 16,
        "max_source_positions": 100,
    }  # fmt: skip
    model = _MAKE[kind](tokenizer, {**text, **ends}, whisper)
    model.generation_config = transformers.GenerationConfig(**{**ends, "eos_token_id": tokenizer.eos_token_id})
    for name, parameter in model.named_parameters():  # default initialization leaves sounds nearly without effect
        if parameter.ndim > 1 and "embed_positions" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval(), processor


def _qwen2_audio(tokenizer: Any, text: dict[str, Any], whisper: dict[str, Any]) -> Any:
    config = transformers.Qwen2AudioConfig(
        audio_config=whisper, text_config={**text, "model_type": "qwen2"}, audio_token_index=tokenizer.audio_token_id
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _qwen2_5_omni(tokenizer: Any, text: dict[str, Any], whisper: dict[str, Any]) -> Any:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    vision |= {
        "out_hidden_size": text["hidden_size"],
        "spatial_merge_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [0],
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config={**whisper, "n_window": 100, "output_dim": text["hidden_size"]}, vision_config=vision,
        text_config={**text, "rope_parameters": rope}, audio_token_index=tokenizer.audio_token_id,
        image_token_index=tokenizer.image_token_id, video_token_index=tokenizer.video_token_id,
        audio_start_token_id=tokenizer.audio_bos_token_id, audio_end_token_id=tokenizer.audio_eos_token_id,
        vision_start_token_id=tokenizer.vision_bos_token_id, vision_end_token_id=tokenizer.vision_eos_token_id,
    )  # fmt: skip
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


def _gemma3n(tokenizer: Any, text: dict[str, Any], whisper: dict[str, Any]) -> Any:
    """Its vision tower is timm's MobileNetV5, made small; where timm is not installed, `Tower`, which no folder gives back."""
    size = len(tokenizer)
    text = {
        **text, "vocab_size": size + 16, "vocab_size_per_layer_input": size, "hidden_size_per_layer_input": 8, "head_dim": 16, "num_kv_shared_layers": 0,
        "intermediate_size": [64, 64], "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0], "altup_num_inputs": 2, "sliding_window": 16,
    }  # fmt: skip
    hearing = {
        "vocab_size": 8, "vocab_offset": size + 8, "input_feat_size": 16, "hidden_size": 16, "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1, "sscp_conv_channel_size": [8, 4], "conf_attention_chunk_size": 4,
        "conf_attention_context_left": 5,
    }  # fmt: skip
    tower: dict[str, Any] = {"hidden_size": _WIDTH, "vocab_size": 8, "vocab_offset": size}
    if is_timm_available():
        tower |= {"hidden_size": 2048, "model_args": _small_mobilenet()}
    config = transformers.Gemma3nConfig(
        text_config=text, audio_config=hearing, vision_config=tower, vision_soft_tokens_per_image=4,
        audio_soft_tokens_per_image=14, audio_token_id=tokenizer.audio_token_id, image_token_id=tokenizer.image_token_id,
        boa_token_id=tokenizer.boa_token_id, eoa_token_id=tokenizer.eoa_token_id, boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
    )  # fmt: skip
    if is_timm_available():
        model = transformers.Gemma3nForConditionalGeneration(config)
        config.vision_config.model_args = _small_mobilenet()  # timm writes classes into those that it gets
        return model
    clip = transformers.CLIPVisionConfig(hidden_size=_WIDTH, num_hidden_layers=1, num_attention_heads=2)
    clip.vocab_size, clip.vocab_offset, clip.rms_norm_eps = 8, size, 1e-6
    vars(config)["vision_config"] = clip  # by assignment it is refused
    model = transformers.Gemma3nForConditionalGeneration(config)
    model.model.vision_tower = Tower()
    return model


class Tower(torch.nn.Module):
    """A convolution in the place of timm's tower: images [B, 3, 64, 64] to [B, 16, 2, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, _WIDTH, _SIDE // 2, _SIDE // 2)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> Any:
        return BaseModelOutputWithPooling(last_hidden_state=self.patches(pixel_values))


def _small_mobilenet() -> dict[str, Any]:
    """Arguments of timm's MobileNetV5 for a tower of a layer or two a stage."""
    from timm.models._efficientnet_builder import decode_arch_def

    stages = [
        ["er_r1_k3_s2_e2_c8"],
        ["uir_r1_a3_k5_s2_e2_c8"],
        ["uir_r1_a5_k5_s2_e2_c16", "mqa_r1_k3_h2_v2_s1_d8_c16", "uir_r1_a0_k0_s1_e2_c16"],
        ["uir_r1_a5_k5_s2_e2_c16", "mqa_r1_k3_h2_s1_d8_c16", "uir_r1_a0_k0_s1_e2_c16"],
    ]
    return {"block_args": decode_arch_def(stages), "stem_size": 8, "msfa_output_resolution": 2}


_MAKE = {"qwen2_audio": _qwen2_audio, "qwen2_5_omni": _qwen2_5_omni, "gemma3n": _gemma3n}


def tone(hertz: float, seconds: float = 0.5, rate: int = RATE) -> dict[str, Any]:
    """A sine of half the full scale, as `datasets.Audio` gives it."""
    samples = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    return {"array": samples.astype(np.float32), "sampling_rate": rate}


def write_wav(path: Path, sound: dict[str, Any], channels: int = 1) -> Path:
    """A file of 16 bits a sample, every channel the same."""
    samples = np.repeat((sound["array"] * 32767).round().astype("<i2")[:, None], channels, axis=1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(sound["sampling_rate"])
        file.writeframes(samples.tobytes())
    return path


def needs_soundfile() -> Any:
    """soundfile, or the test is skipped."""
    return pytest.importorskip("soundfile", reason="files of sound need covey[audio]")
