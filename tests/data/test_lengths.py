"""The longest prompt in tokens, which is not the one of most characters."""

from __future__ import annotations

import random
from itertools import product

import pytest
from datasets import Dataset

from covey import GRPOConfig, demo
from covey.cli.plan import longest_prompt_tokens
from covey.data import lengths, prepare_tokenizer
from covey.data.lengths import longest_prompt
from covey.data.prompts import to_prompt
from covey.models import load_tokenizer
from kit import rest_nightly, tiny_tokenizer

WORDS = ("Tom", "has", "apples", "and", "buys", "more", "answer")


def rows_of(count: int, place: int, longest: str) -> Dataset:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) for _ in range(count)]
    texts[place] = longest
    return Dataset.from_list([{"prompt": text} for text in texts])


LONGEST = ["1234567890" * 20, "数学问题" * 15, "+-*/=()" * 20, "zqxj" * 30]


@pytest.mark.parametrize("place, longest", rest_nightly([*product((0, 433, 899), LONGEST)], [(433, LONGEST[1])]))
def test_a_row_of_many_tokens_and_few_characters_is_found(place, longest, monkeypatch):
    monkeypatch.setattr(lengths, "SAMPLE", 90)
    tokenizer, dataset = prepare_tokenizer(tiny_tokenizer()), rows_of(900, place, longest)
    counted = [len(ids) for ids in tokenizer(dataset["prompt"][:])["input_ids"]]
    assert longest_prompt(dataset, tokenizer, {}) == max(counted)


def test_messages_are_counted_as_the_template_writes_them():
    tokenizer = prepare_tokenizer(tiny_tokenizer())
    chats = [[{"role": "user", "content": "7" * size}] for size in (3, 40, 9)]
    dataset = Dataset.from_list([{"prompt": chat} for chat in chats])
    expected = len(to_prompt({"prompt": chats[1]}, "1", "row 1", tokenizer, {}).token_ids)
    assert longest_prompt(dataset, tokenizer, {}) == expected
    assert longest_prompt(dataset.to_iterable_dataset(), tokenizer, {}) == expected


def test_memory_is_planned_for_the_tokens_of_the_longest_prompt(tmp_path):
    config = GRPOConfig(str(tmp_path), report_to="none")
    dataset = Dataset.from_list([{"prompt": "1" * 90}, {"prompt": "a word " * 12}])
    tokenizer = load_tokenizer(None, demo.model_path())
    assert longest_prompt_tokens(dataset, "demo", config) == len(tokenizer("1" * 90)["input_ids"]) > 80
