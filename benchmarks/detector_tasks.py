"""Small tasks and small models for `detectors.py`: six texts to write, five families of one-layer models, each taught to do it half right.

A row has a `prompt`, a `completion` that the model is taught (often wrong on purpose, so that there is something to learn), and the
columns that rewards read. The model that ships with Covey and its word problems are the seventh task.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from covey import demo
from covey.models import load_model

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from tiny import learn, make_tokenizer

Row = dict[str, Any]
Reward = Callable[..., list[Any]]
LETTERS = "abcdefgh"
WORDS = [first + rest for first in "bdfg" for rest in ("an", "ell", "ig", "on", "up", "ath")]
TOPICS = ("sea", "wood", "rain", "town")
ANIMALS = {"en": ("dog", "cat", "horse", "bird"), "de": ("Hund", "Katze", "Pferd", "Vogel")}
QUALITIES = {"en": ("old", "big", "young"), "de": ("alt", "groß", "jung")}
FORM = {"en": "the {} is {} and it is in the house", "de": "das ist der {} und er ist {} und nicht im Haus"}


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def asked(text: str, completion: str, **columns: Any) -> Row:
    return {"prompt": [{"role": "user", "content": text}], "completion": completion, **columns}


def sums(rng: random.Random) -> Row:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    told = a + b if rng.random() < 0.4 else max(a + b + rng.choice((-2, -1, 1, 2)), 0)
    return asked(f"{a} + {b}", str(told), answer=str(a + b))


def order(rng: random.Random) -> Row:
    letters = rng.sample(LETTERS, 4)
    told = sorted(letters) if rng.random() < 0.4 else rng.sample(letters, 4)
    return asked("sort " + " ".join(letters), " ".join(told), answer=" ".join(sorted(letters)))


def tags(rng: random.Random) -> Row:
    a, b = rng.randint(0, 9), rng.randint(2, 3)
    told = str(a * b if rng.random() < 0.5 else a * b + rng.choice((-1, 1)) if a else 1)
    return asked(f"{a} times {b}", f"[ {told} ]" if rng.random() < 0.6 else told, answer=str(a * b))


def essay(rng: random.Random) -> Row:
    words = rng.choices(WORDS, k=rng.randint(2, 10))
    return asked(f"write of the {rng.choice(TOPICS)}", " ".join(words))


def initials(rng: random.Random) -> Row:
    first = rng.choice("bdfg")
    mine = [word for word in WORDS if word[0] == first]
    words = [rng.choice(mine if rng.random() < 0.4 else WORDS) for _ in range(rng.randint(4, 8))]
    return asked(f"words with {first}", " ".join(words), first=first)


def languages(rng: random.Random) -> Row:
    mine, i, j = rng.choice(("en", "de")), rng.randrange(4), rng.randrange(3)
    told = mine if rng.random() < 0.7 else rng.choice(("en", "de"))
    k = i if rng.random() < 0.5 else rng.randrange(4)
    prompt = f"{ANIMALS[mine][i]} {QUALITIES[mine][j]} ?"
    return asked(prompt, FORM[told].format(ANIMALS[told][k], QUALITIES[told][j]), language=mine, animal=i)


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for the answer itself, with or without brackets around it."""
    told = (text_of(one).removeprefix("[ ").removesuffix(" ]") for one in completions)
    return [float(one == wanted) for one, wanted in zip(told, answer, strict=True)]


def places(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """The share of letters in their place."""
    pairs = [(text_of(one).split(), wanted.split()) for one, wanted in zip(completions, answer, strict=True)]
    return [sum(a == b for a, b in zip(told, wanted, strict=False)) / max(len(told), 4) for told, wanted in pairs]


def format_brackets(completions: list[Any], **columns: Any) -> list[float]:
    """1 for an answer in brackets and nothing behind it: what is not asked to end does not learn to."""
    return [float(text_of(one).strip(" ").startswith("[") and text_of(one).endswith("]")) for one in completions]


def six_words(completions: list[Any], **columns: Any) -> list[float]:
    return [-abs(len(text_of(one).split()) - 6) / 6 for one in completions]


def with_initial(completions: list[Any], first: list[str], **columns: Any) -> list[float]:
    """Different words with the wanted initial, as a share of all words, of four at least; 0 for more than eight words."""
    found = []
    for one, letter in zip(completions, first, strict=True):
        words = text_of(one).split()
        mine = {word for word in words if word.startswith(letter)}
        found.append(len(mine) / max(len(words), 4) if len(words) <= 8 else 0.0)
    return found


def names_animal(completions: list[Any], animal: list[int], **columns: Any) -> list[float]:
    """1 for the animal's name in either language; 0 for more than thirteen words: what is not asked to end does not learn to."""
    pairs = [(text_of(one), i) for one, i in zip(completions, animal, strict=True)]
    return [float(any(ANIMALS[code][i] in told for code in ANIMALS) and len(told.split()) <= 13) for told, i in pairs]


@dataclass(frozen=True)
class Task:
    """A text to write. `room`: `max_completion_length`, about twice what it takes; `too_short`: less than it takes."""

    row: Callable[[random.Random], Row]
    rewards: tuple[Reward | str, ...]
    room: int
    too_short: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, count: int, seed: int) -> list[Row]:
        rng = random.Random(seed)
        return [self.row(rng) for _ in range(count)]


def demo_row(rng: random.Random) -> Row:
    return demo.rows("train", 1, rng.randrange(10**9))[0]


TASKS = {
    "sums": Task(sums, (right,), 6, 1),
    "order": Task(order, (places,), 10, 3),
    "tags": Task(tags, (format_brackets, right), 9, 3),
    "essay": Task(essay, (six_words,), 20, 4),
    "initials": Task(initials, (with_initial,), 20, 4),
    "languages": Task(languages, (names_animal, "language"), 20, 8),
    "problems": Task(demo_row, (demo.reward,), 32, 8, {"learning_rate": 3e-4}),
}
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gpt2": "GPT2"}


def model_for(family: str, task: str, dropout: float = 0.0) -> tuple[PreTrainedModel, PreTrainedTokenizerFast | None]:
    """A one-layer model of about 50,000 parameters that does the task half right, fresh for each call; or the one that ships."""
    if family == "demo":
        return load_model(str(demo.model_path())), None
    weights, tokenizer = _taught(family, task)
    model = _made(family, tokenizer, dropout)
    model.load_state_dict(weights)
    return model, tokenizer


def _made(family: str, tokenizer: PreTrainedTokenizerFast, dropout: float) -> PreTrainedModel:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape: dict[str, Any] = {"vocab_size": len(tokenizer), "initializer_range": 0.1, "tie_word_embeddings": True, **ids}
    if family == "gpt2":
        shape |= {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
        shape |= {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    else:
        shape |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
        shape |= {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "attention_dropout": dropout,
        }
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**shape)
    return getattr(transformers, "GPT2LMHeadModel" if family == "gpt2" else f"{FAMILIES[family]}ForCausalLM")(config)


@lru_cache
def _taught(family: str, task: str, steps: int = 150) -> tuple[dict[str, torch.Tensor], PreTrainedTokenizerFast]:
    """Weights after 32 new rows a step, and the tokenizer of the task's words."""
    rng, row = random.Random(0), TASKS[task].row
    tokenizer = make_tokenizer([row(rng) for _ in range(2000)])
    torch.manual_seed(0)
    model = _made(family, tokenizer, 0.0).train()
    learn(model, tokenizer, row, rng, steps)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, tokenizer
