"""Whatever a model writes, a built-in reward gives a number in its range or abstains, and gives it again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rewards import resolve
from example_counts import examples

PIECES = [
    "####",
    "\\boxed{",
    "}",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "7",
    "B",
    "1e5",
    "```json\n",
    "\n```",
    "{",
    '"a":',
    "the ",
]
TEXTS = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(PIECES)), max_size=12).map("".join)

IN_0_1 = [
    "exact",
    "format",
    "think_format",
    "pattern(pattern='a.*b', match='anywhere')",
    "tags",
    "tags(partial=True)",
    "json_schema(schema={'type': 'object'})",
    "choice",
    "numeric",
    "numeric(scale=2)",
    "f1",
    "fuzzy",
    "rouge",
    "rouge(kind='2', max_ratio=1.5)",
    "bleu",
    "distinct",
    "language(language='en')",
]
IN_MINUS_1_0 = ["self_bleu", "repetition", "soft_overlong(max_completion_len=8, soft_punish_cache=4)"]


def scores(reward, texts, gold):
    ids = [list(text.encode(errors="surrogatepass")) for text in texts]
    golds = {name: [gold] * len(texts) for name in ("answer", "solution", "reference")}
    return reward(completions=texts, completion_ids=ids, **golds)


@pytest.mark.parametrize("name", [*IN_0_1, *IN_MINUS_1_0])
@examples(10)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_any_text_has_a_score_in_range_and_the_same_again(name, texts):
    reward = resolve(name).call
    found = scores(reward, texts, "B" if name == "choice" else "7 bananas")
    low, high = (0, 1) if name in IN_0_1 else (-1, 0)
    assert len(found) == len(texts)
    assert all(score is None or (math.isfinite(score) and low - 1e-9 <= score <= high + 1e-9) for score in found)
    assert found == scores(reward, texts, "B" if name == "choice" else "7 bananas")


@pytest.mark.parametrize("name", ["exact", "numeric", "fuzzy", "f1", "rouge", "bleu(max_n=2)"])
@examples(25)
@given(value=st.integers(-(10**12), 10**12))
def test_the_gold_answer_itself_always_has_full_marks(name, value):
    assert scores(resolve(name).call, [str(value)], str(value)) == [pytest.approx(1.0)]
