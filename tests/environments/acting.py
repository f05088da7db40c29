"""A tiny model that really calls a tool: trained for a few seconds to write one conversation, and the tokenizer it speaks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n<tool_response>\\n' }}{{ m.content }}{{ '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template of ChatML with Hermes tool calls, as Qwen's are."""
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Messages in channels, as gpt-oss writes them, by shape."""


def chat_tokenizer(template: str | None = CHATML, specials: tuple[str, ...] = (), eos: str = "<|im_end|>") -> Any:
    """A tokenizer of single bytes with the words of chat templates as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<pad>", *specials]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.chat_template = template
    return tokenizer


def tiny_llama(tokenizer: Any, seed: int = 0, heads: int = 4) -> LlamaForCausalLM:
    """A Llama of one layer with the tokenizer's vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def tiny_qwen3_5(tokenizer: Any, seed: int = 0) -> Qwen3_5ForCausalLM:
    """A Qwen3.5 of a gated delta net and an attention layer, with the tokenizer's vocabulary."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return Qwen3_5ForCausalLM(config).float()


def trained_on(texts: tuple[tuple[str, str], ...], steps: int = 80, make: Callable[[Any], Any] = tiny_llama) -> Any:
    """A model that continues each first text with the second, greedily. The loss is on the second alone. A copy, to be trained further."""
    return copy.deepcopy(_trained_on(texts, steps, make))


@functools.cache
def _trained_on(texts: tuple[tuple[str, str], ...], steps: int, make: Callable[[Any], Any]) -> Any:
    tokenizer = chat_tokenizer()
    model = make(tokenizer)
    rows = []
    for before, after in texts:
        first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after))
        rows.append((torch.tensor([first + second]), torch.tensor([[-100] * len(first) + second])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(steps):
        loss = sum(model(input_ids=ids, labels=labels).loss for ids, labels in rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def calls_in(template: Any, token_ids: Any) -> tuple[str, list[Any]]:
    """Text of a model's turn behind a question, without its tool calls, and the calls."""
    asked = [{"role": "user", "content": "qxquestion"}]
    text, calls, _ = template.turn_in(token_ids, template._render(asked, tokenize=True, add_generation_prompt=True))
    return text, calls
