"""Tiny models that see or hear and call a tool: a chat template with tools whose contents may be parts, and models trained to call."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch

from covey.data.prompts import to_prompt
from covey.learner.packing import Row
from covey.models.modalities import forget_positions, whole_inputs
from covey.types import Group, Prompt
from environments.acting import CHATML, chat_tokenizer
from environments.tool_runs import CALL, add, bridge
from modalities.models import PLACEHOLDER, SEEING, picture, tiny_vlm
from modalities.sound_models import KINDS as HEARING
from modalities.sound_models import PLACES, tiny_hearing_model, tone

PARTS_ALONE = ("idefics3", "llava")
"""Kinds whose template here reads contents in parts alone, as those models' do."""


def acting_template(kind: str) -> str:
    """ChatML with tools, whose contents are parts, or text where the kind takes it."""
    places = {"image": PLACEHOLDER[kind]} if kind in SEEING else PLACES[kind]
    loop = "{% for part in CONTENT or [] %}"
    loop += "".join(
        f"{{% {'el' * (i > 0)}if part.type == '{name}' %}}{place}" for i, (name, place) in enumerate(places.items())
    )
    loop += "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    if kind not in PARTS_ALONE:
        loop = "{% if CONTENT is string %}{{ CONTENT }}{% else %}" + loop + "{% endif %}"
    content = loop.replace("CONTENT", "m.content")
    return CHATML.replace("{{ m.content or '' }}", content).replace("{{ m.content }}", content)


def acting_model(kind: str, **made: Any) -> tuple[Any, Any]:
    """(model in eval mode, processor) with random weights and the tokenizer of `chat_tokenizer`."""
    make = tiny_vlm if kind in SEEING else tiny_hearing_model
    model, processor = make(kind, base=chat_tokenizer(acting_template(kind)), **made)
    model.config.get_text_config().max_position_embeddings = 2048
    return model, processor


def item(kind: str, i: int = 0) -> dict[str, Any]:
    """Columns of a row with an image or a sound."""
    return {"image": picture(1 + i % 3, seed=i)} if kind not in HEARING else {"audio": tone(300 + 200 * i, 0.5)}


def row(kind: str, i: int = 0, text: str = "q") -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], **item(kind, i)}


def prompt_of(processor: Any, row: dict[str, Any], uid: str = "0:0", tools: tuple[Any, ...] = (add,)) -> Prompt:
    """The row as a run with these tools encodes it."""
    from covey.environments import tools_of

    shown = {"tools": [one.schema for one in tools_of(tools)]} if tools else {}
    return to_prompt(row, uid, f"row {uid}", processor.tokenizer, shown, processor)


def rows_of(groups: list[Group]) -> list[Row]:
    """Every completion as a row of the learner."""
    return [
        Row(group.prompt, completion, g, torch.ones(()), completion.written)
        for g, group in enumerate(groups)
        for completion in group.completions
    ]


def add_shown(a: int, b: int) -> list:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return [{"type": "text", "text": str(a + b)}, {"type": "image", "image": picture(a + b - 5, seed=b)}]


add_shown.__name__ = "add"


def template_of(processor: Any, tools: tuple[Any, ...]) -> Any:
    """The template of a run with these tools, which shows answers with media."""
    from covey.environments import Template, tools_of

    options = {"chat_template": processor.chat_template, "tools": [one.schema for one in tools_of(tools)]}
    tokenizer = processor.tokenizer
    return Template(tokenizer, [tokenizer.eos_token_id], options, processor=processor)


def answered(processor: Any, tool: Any = add_shown) -> Any:
    """Tokens and media of the answer to the call of 3 and 4."""
    message = {"role": "tool", "name": "add", "content": tool(3, 4), "tool_call_id": "call00001"}
    return template_of(processor, (tool,)).reply([message])


def seeing_caller(kind: str, text: str = "q", **made: Any) -> tuple[Any, Any]:
    """A model that looks at an image (or listens), calls `add`, and then says the sum; and its processor.

    `shows`: the answer is that of `add_shown`.
    """
    model, processor = _seeing_caller(kind, text, **made)
    return copy.deepcopy(model), processor


@functools.cache
def _seeing_caller(kind: str, text: str, steps: int = 60, hidden: int = 64, shows: bool = False) -> tuple[Any, Any]:
    model, processor = acting_model(kind, hidden=hidden)
    encode = lambda words: processor.tokenizer(words, add_special_tokens=False)["input_ids"]
    shown = [prompt_of(processor, row(kind, i, text), f"0:{i}") for i in range(2)]
    call, said = encode(CALL), encode("7<|im_end|>")
    reply = answered(processor) if shows else None
    answer = encode(bridge("7")) if reply is None else list(reply.token_ids)
    written = [*call, *answer, *said]
    if reply is not None:
        behind = lambda prompt: reply.media.behind(prompt.media, len(prompt.token_ids) + len(call))
        shown = [replace(prompt, media=behind(prompt)) for prompt in shown]
    learnt = torch.tensor([True] * len(call) + [False] * len(answer) + [True] * len(said))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss: Any = 0.0
        for prompt in shown:
            logits = model(**whole_inputs(model, prompt, written)).logits[0, len(prompt.token_ids) - 1 : -1]
            forget_positions(model)
            loss = loss + torch.nn.functional.cross_entropy(logits[learnt], torch.tensor(written)[learnt])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), processor
