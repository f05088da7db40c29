"""Tiny models of every kind, and prompts with images or sounds for them."""

from models import KINDS, picture, tiny_vlm
from sound_models import KINDS as HEARING
from sound_models import tiny_hearing_model, tone

from covey.data.prompts import to_prompt

ALL = (*KINDS, *HEARING)
EMBEDDED = tuple(kind for kind in ALL if kind not in ("gemma3", "gemma3n"))
"""Models whose language model needs embeddings and positions alone."""


def tiny_of(kind):
    """(model in eval mode, processor) with random weights."""
    return tiny_vlm(kind) if kind in KINDS else tiny_hearing_model(kind)


def ask(text):
    return [{"role": "user", "content": text}]


def rows_of(kind):
    """One item, two items of different sizes, none; of Qwen2.5-Omni an image with a sound, too."""
    if kind in KINDS:
        items = {"image": picture(2)}, {"images": [picture(3, (64, 32), 1), picture(1)]}
    else:
        items = {"audio": tone(440)}, {"audios": [tone(300, 1.2), tone(900, 0.3)]}
    rows = [{"prompt": ask("How many?"), **items[0]}, {"prompt": ask("More in the first?"), **items[1]}]
    rows.append({"prompt": ask("What is 2 + 3?")})
    if kind == "qwen2_5_omni":
        rows.append({"prompt": ask("Which fits?"), "image": picture(3), "audio": tone(700, 0.8)})
    return rows


def prompts(processor, kind):
    return [
        to_prompt(row, f"0:{i}", f"row {i}", processor.tokenizer, {}, processor) for i, row in enumerate(rows_of(kind))
    ]
