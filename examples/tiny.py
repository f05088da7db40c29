"""What the examples need where there is no network: problems for the model that ships, and tiny models taught in seconds.

With a real model you need none of this: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and a data set of yours.
"""

from __future__ import annotations

import covey  # noqa: F401  # isort: skip  # before torch: docs/performance.md, threads

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from covey import demo

Row = dict[str, Any]
"""`prompt`, a list of chat messages, and `completion`, a text."""
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORD = Regex(r" ?[A-Za-zÀ-ž_]+|\d|\s|[^\s]")
"""A token: a word with the space before it, a digit, or any other character."""


def is_smoke(header: str) -> bool:
    """`--smoke` of the command line. `--help` prints the header; a mistyped option ends the program before it trains."""
    return bool(_parser(header).parse_args().smoke)


def smoke_and_seed(header: str) -> tuple[bool, int]:
    """`--smoke` and `--seed` of the command line, as `is_smoke`."""
    parser = _parser(header)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    return given.smoke, given.seed


def _parser(header: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=header, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see it work")
    return parser


def problems(count: int = 1000, split: str = "train") -> Dataset:
    """Word problems of two steps, of which the model that ships ("demo") misreads one in two: columns `prompt` and `answer`."""
    found = [one for one in demo.problems(split, 4 * count) if len(one.operations) == 2][:count]
    rows = [{"prompt": [{"role": "user", "content": one.question}], "answer": str(one.answer)} for one in found]
    return Dataset.from_list(rows)


def taught(folder: str, row: Callable[[random.Random], Row], *, steps: int = 120, hidden: int = 64) -> str:
    """The folder of a Llama of 0.1 million parameters that learnt `completion` after `prompt` from 32 new rows a step."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer([row(rng) for _ in range(2000)])
    model = make_model(tokenizer, hidden)
    learn(model, tokenizer, row, rng, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def learn(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    row: Callable[[random.Random], Row],
    rng: random.Random,
    steps: int,
) -> None:
    """Train the model on `completion` after `prompt`, 32 new rows a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        rows = [row(rng) for _ in range(32)]
        prompts = [
            tokenizer.apply_chat_template(one["prompt"], add_generation_prompt=True, tokenize=False) for one in rows
        ]
        texts = [f"{prompt}{one['completion']}{tokenizer.eos_token}" for prompt, one in zip(prompts, rows, strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", return_token_type_ids=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for line, prompt in zip(labels, prompts, strict=True):
            line[: len(tokenizer(prompt).input_ids)] = -100
        model(**batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int) -> LlamaForCausalLM:
    """Random weights, two layers. A Llama: for others transformers may read a saved tokenizer as that family's own."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,  # a narrow model learns to copy from its prompt ten times as fast as from 0.02
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_tokenizer(rows: list[Row]) -> PreTrainedTokenizerFast:
    """A tokenizer of the words that occur in the rows."""
    core = Tokenizer(models.WordLevel({}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(WORD, "isolated")
    core.decoder = decoders.Fuse()
    texts = [text for row in rows for text in (row["completion"], *(one["content"] for one in row["prompt"]))]
    words = sorted({piece for text in texts for piece, _ in core.pre_tokenizer.pre_tokenize_str(text)})
    special = ["<unk>", "<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
    core.model = models.WordLevel({word: i for i, word in enumerate(special + words)}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=special[3:],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
