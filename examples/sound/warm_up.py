"""A model of 0.07 million parameters that hears (Qwen2-Audio's form), taught from labelled sounds until it names nearly half of them right.

`python warm_up.py FOLDER [STEPS]` writes model and processor. No weights are downloaded.
"""

from __future__ import annotations

import covey  # noqa: F401  # isort: skip  # before torch: docs/performance.md, threads

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tones import RATE, TONES, questions
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

SPECIAL = ["<pad>", "<eos>", "<|AUDIO|>", "<user>", "<answer>"]
WORDS = ["Which", "tone", "?", *TONES, "E", "F", "G"]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<user>{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|AUDIO|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% else %}<answer>{{ message['content'] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
BINS, FRAMES = 24, 50
"""Mel bins, and frames of the encoder for the second that the processor hears at most."""


def make_processor() -> Any:
    """A word-level tokenizer of the task's words, and spectrograms of one second."""
    words = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=SPECIAL[2:]
    )
    hearing = WhisperFeatureExtractor(feature_size=BINS, sampling_rate=RATE, hop_length=80, chunk_length=1, n_fft=400)
    return Qwen2AudioProcessor(hearing, tokenizer, chat_template=TEMPLATE)


def make_model(processor: Any) -> Any:
    """Random weights: one layer of a Whisper encoder, two of a Qwen2."""
    tokenizer = processor.tokenizer
    hearing = {
        "num_mel_bins": BINS, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "max_source_positions": FRAMES,
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip
    config = Qwen2AudioConfig(
        audio_config=hearing,
        text_config=text,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2AudioForConditionalGeneration(config)
    for name, weight in model.named_parameters():  # the initial weights are for models a hundred times as wide
        if weight.ndim > 1 and "embed_positions" not in name:
            torch.nn.init.normal_(weight, std=0.3 if "embed_tokens" in name else weight[0].numel() ** -0.5)
    return model


def batch_of(rows: list[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """Question, sound and answer of each row, with labels on the answer alone."""
    texts = [f"<user><|AUDIO|>{row['prompt'][0]['content']}<answer>{row['answer']}<eos>" for row in rows]
    sounds = [row["audio"]["array"] for row in rows]
    inputs = dict(processor(text=texts, audio=sounds, sampling_rate=RATE, return_tensors="pt", padding=True))
    labels = inputs["input_ids"].clone()
    labels[:, :-2] = -100  # every text has the same length
    return {**inputs, "labels": labels}


def warm_up(folder: Path, steps: int = 60, seed: int = 0, until: float = 0.45) -> None:
    """Supervised steps on sounds drawn anew, until the right letter has the probability `until`; model and processor into `folder`."""
    torch.manual_seed(seed)
    processor = make_processor()
    model = make_model(processor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        rows = questions(32, seed=1_000_000 * (seed + 1) + step)
        batch = batch_of(rows, processor)
        output = model(**batch)
        chances = output.logits[:, -3].softmax(-1).gather(1, batch["input_ids"][:, -2:-1])
        if chances.mean() >= until:
            break
        loss = output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, right {chances.mean().item():.1%}", flush=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    warm_up(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60)
