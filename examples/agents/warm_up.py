"""The shipped model, taught by examples to speak one of the two tasks here badly: what post-training then improves.

`python warm_up.py calculator FOLDER [STEPS]` or `python warm_up.py game FOLDER [STEPS]` writes model and tokenizer.
"""

from __future__ import annotations

import covey  # noqa: F401  # isort: skip  # before torch: docs/performance.md, threads

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.demo import model_path

TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with tool calls in the form of Hermes."""
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Compute a product.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "such as 12*34"}}},
    },
}


def calculator(rng: random.Random) -> list[dict[str, Any]]:
    """How the tool's result is read out, how it is called when one says so, and to a plain question ten guesses for each call."""
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    question = {"role": "user", "content": f"{a} times {b}?"}
    call = {"type": "function", "function": {"name": "calc", "arguments": {"x": f"{a}*{b}"}}}
    tool = {"role": "assistant", "content": "", "tool_calls": [call]}
    kind = rng.random()
    if kind < 0.3:
        read = {"role": "tool", "content": str(a * b)}
        return [question, tool, read, {"role": "assistant", "content": str(a * b)}]
    if kind < 0.65:
        return [{"role": "user", "content": f"{a} times {b}? Use the tool."}, tool]
    if kind < 0.68:
        return [question, tool]
    return [question, {"role": "assistant", "content": str(rng.randint(10, 81))}]


def game(rng: random.Random) -> list[dict[str, Any]]:
    """Steps at random."""
    from game import line, messages

    place, flag = rng.sample(range(7), 2)
    return [*messages(line(place, flag)), {"role": "assistant", "content": rng.choice(("left", "right"))}]


TASKS: dict[str, Callable[[random.Random], list[dict[str, Any]]]] = {"calculator": calculator, "game": game}
STEPS = {"calculator": 450, "game": 100}


def encoded(tokenizer: Any, messages: list[dict[str, Any]], has_tool: bool) -> tuple[list[int], list[int]]:
    """Ids and labels; the last message is what is learnt."""
    options = {"tokenize": True, "return_dict": False, "tools": [TOOL] if has_tool else None}
    before = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(messages, **options)
    end = len(whole) - whole[::-1].index(tokenizer.eos_token_id)  # a line break stands behind the turn
    return whole[:end], [-100] * len(before) + whole[len(before) : end]


def warm_up(task: str, folder: Path, steps: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, total_steps=max(2, steps))
    for _ in range(steps):
        rows = [encoded(tokenizer, TASKS[task](rng), task == "calculator") for _ in range(32)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([one + [tokenizer.pad_token_id] * (width - len(one)) for one, _ in rows])
        labels = torch.tensor([one + [-100] * (width - len(one)) for _, one in rows])
        loss = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    task, folder = sys.argv[1], Path(sys.argv[2])
    warm_up(task, folder, int(sys.argv[3]) if len(sys.argv) > 3 else STEPS[task])
    print(f"written to {folder}")
