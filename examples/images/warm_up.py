"""A vision-language model of 0.17 million parameters (LLaVA's form), taught from labelled pictures until it counts half of them right.

`python warm_up.py FOLDER [STEPS]` writes model and processor. No weights are downloaded.
"""

from __future__ import annotations

import covey  # noqa: F401  # isort: skip  # before torch: docs/performance.md, threads

import sys
from pathlib import Path
from typing import Any

import torch
from shapes import CELL, CELLS, questions
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

WORDS = ["How", "many", "red", "blue", "squares", "?", *map(str, range(10))]
SPECIAL = ["<pad>", "<eos>", "<image>", "<user>", "<answer>"]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<user>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% else %}<answer>{{ message['content'] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def make_processor() -> Any:
    """A word-level tokenizer of the task's words, and images of 40 x 40 pixels."""
    words = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=SPECIAL[2:]
    )
    side = CELLS * CELL
    images = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=side)
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def make_model(processor: Any) -> Any:
    """Random weights: one layer of a CLIP vision tower, two of a Llama."""
    tokenizer = processor.tokenizer
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": CELLS * CELL, "patch_size": CELL, "projection_dim": 64,
    }  # fmt: skip
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=CELLS * CELLS,
        vision_feature_layer=-1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlavaForConditionalGeneration(config)
    for (
        name,
        weight,
    ) in model.named_parameters():  # transformers' initial weights are for models a hundred times as wide
        if weight.ndim > 1:
            is_table = "embed" in name and "patch" not in name
            torch.nn.init.normal_(weight, std=0.3 if is_table else weight[0].numel() ** -0.5)
    return model


def batch_of(rows: list[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """Question, picture and answer of each row, with labels on the answer alone."""
    texts = [f"<user><image>{row['prompt'][0]['content']}<answer>{row['answer']}<eos>" for row in rows]
    given = dict(processor(text=texts, images=[row["image"] for row in rows], return_tensors="pt", padding=True))
    labels = given["input_ids"].clone()
    labels[:, :-2] = -100  # every text has the same length
    return {**given, "labels": labels}


def warm_up(folder: Path, steps: int = 160, seed: int = 0) -> None:
    """Supervised steps on pictures drawn anew; the model and its processor into `folder`."""
    torch.manual_seed(seed)
    processor = make_processor()
    model = make_model(processor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        loss = model(**batch_of(questions(64, seed=1_000_000 + step), processor)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    warm_up(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 160)
