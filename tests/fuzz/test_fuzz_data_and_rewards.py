"""Data sets and what rewards return, of any shape: used, or refused with the row and the fix."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from fuzzing import damages, fuzz, json_values, only_covey_errors, texts
from hypothesis import example, given
from hypothesis import strategies as st

from covey.data import PromptStream, load
from covey.data.checks import check_dataset
from covey.data.prompts import to_prompt
from covey.rewards import Scorer
from covey.rewards.contract import to_scores
from example_counts import examples
from kit import group, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
roles = st.sampled_from(["user", "system", "assistant", "tool", "", "boss"])
messages = st.lists(
    st.fixed_dictionaries({"role": roles | json_values, "content": texts | json_values}) | json_values, max_size=3
)
prompts = texts | messages | json_values
rows = st.fixed_dictionaries(
    {"prompt": prompts}, optional={"answer": json_values, "chat_template_kwargs": json_values, "text": texts}
)
WHOLE = b"".join(json.dumps({"prompt": f"What is {i} + {i}?", "answer": str(2 * i)}).encode() + b"\n" for i in range(6))


few = examples(8)
"""Every file is a data set that `datasets` builds: a quarter of a second."""


@fuzz
@given(row=rows)
@example(row={"prompt": [{"role": "user", "content": [{"type": "image"}]}]})
@example(row={"prompt": "Hi", "chat_template_kwargs": "enable"})
@example(row={"prompt": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": [1]})
def test_a_row_of_any_shape_becomes_a_prompt_or_is_refused(row: dict[str, Any]) -> None:
    with only_covey_errors():
        found = to_prompt(row, "0:1", "Row 1", TOKENIZER, {})
        assert all(isinstance(token, int) for token in found.token_ids)


@few
@given(table=st.lists(rows | json_values, max_size=4))
def test_a_file_of_any_rows_is_read_or_refused(table: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(json.dumps(row) for row in table).encode("utf-8", "surrogatepass"))
    with only_covey_errors():
        stream = PromptStream(check_dataset(load(path)), TOKENIZER, max_prompt_length=64)
        stream.take(3)


@few
@given(how=damages())
def test_a_damaged_file_of_rows_is_read_or_refused(how: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(how(WHOLE))
    with only_covey_errors():
        PromptStream(check_dataset(load(path)), TOKENIZER).take(3)


@fuzz
@given(values=st.lists(prompts, min_size=1, max_size=3))
def test_a_data_set_in_memory_is_taken_or_refused(values: list[Any]) -> None:
    try:
        dataset = Dataset.from_dict({"prompt": values})
    except (ValueError, TypeError, OverflowError, KeyError, AttributeError):  # Arrow holds no such table
        return
    with only_covey_errors():
        PromptStream(check_dataset(dataset), TOKENIZER).take(2)


returned = (
    json_values
    | st.lists(st.floats() | st.none() | texts, min_size=2, max_size=2)
    | st.builds(range, st.integers(-3, 9))
    | st.builds(lambda values: (value for value in values), st.lists(st.floats(), max_size=3))
    | st.builds(complex, st.floats())
    | st.sets(st.integers(), max_size=2)
    | st.binary(max_size=3)
)


@fuzz
@given(value=returned)
def test_what_a_reward_returns_is_numbers_or_refused(value: Any) -> None:
    with only_covey_errors(TypeError, ValueError):
        scores = to_scores(value, 2, "odd")
        assert len(scores) == 2


@fuzz
@given(value=returned)
def test_a_batch_is_scored_whatever_its_reward_returns(value: Any) -> None:
    def odd(completions: list[Any], **columns: Any) -> Any:
        return value

    with only_covey_errors():
        (scored,) = Scorer.of([odd]).score([group(["a", "b"], uid="0:1")])
        assert scored.rewards is not None
        assert all(math.isfinite(number) or math.isnan(number) for number in scored.rewards.flatten().tolist())
