"""One question in several languages as one group: drawn together, judged together, resumed in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from covey import algorithms as alg
from covey.data.stream import PromptStream
from covey.data.together import columns_of
from covey.errors import ConfigError, DataError
from covey.training.credit import with_advantages
from faults.small_runs import lines, trainer
from kit import group, tiny_tokenizer

ROWS = [
    {
        "prompt": f"{i} apples",
        "prompt_de": f"{i} Äpfel",
        "prompt_zh": f"{i}个苹果",
        "answer": "en",
        "answer_de": "de",
        "level": i,
    }
    for i in range(6)
]
LANGUAGES = ("en", "de", "zh")


def test_a_row_becomes_a_prompt_a_language_with_that_languages_columns():
    stream = PromptStream(Dataset.from_list(ROWS), tiny_tokenizer(), shuffle=False, languages=LANGUAGES)
    drawn = stream.take(4)
    assert [one.text for one in drawn] == ["0 apples", "0 Äpfel", "0个苹果", "1 apples"]
    assert [one.uid for one in drawn] == ["0:0/en", "0:0/de", "0:0/zh", "0:1/en"]
    assert drawn[1].columns == {"answer": "de", "level": 0, "language": "de"}
    assert drawn[2].columns == {"answer": "en", "level": 0, "language": "zh"}
    again = PromptStream(Dataset.from_list(ROWS), tiny_tokenizer(), shuffle=False, languages=LANGUAGES)
    again.load_state_dict(stream.state_dict())  # in the middle of a question
    assert [one.uid for one in again.take(5)] == [one.uid for one in stream.take(5)]


def test_a_language_may_have_an_underscore_and_end_like_another():
    row = {"prompt": "hello", "prompt_pt_br": "oi", "prompt_br": "demat", "answer_pt_br": "x", "answer_br": "y"}
    languages = ("en", "pt_br", "br")
    stream = PromptStream(Dataset.from_list([row]), tiny_tokenizer(), shuffle=False, languages=languages)
    assert [(one.text, one.columns.get("answer")) for one in stream.take(3)] == [
        ("hello", None),
        ("oi", "x"),
        ("demat", "y"),
    ]
    assert columns_of(row, languages) == ["prompt", "answer", "language"]


def test_the_baseline_is_that_of_the_question_over_all_its_languages():
    parts = [
        group(["a", "b"], uid="0:0/en", rewards=[[1.0], [1.0]]),
        group(["a", "b"], uid="0:1/en", rewards=[[0.0], [1.0]]),
        group(["a", "b"], uid="0:0/de", rewards=[[0.0], [0.0]]),
        group(["a", "b"], uid="0:1/de", rewards=[[0.0], [1.0]]),
    ]
    judged = with_advantages(parts, alg.grpo(), torch.ones(1))
    whole = with_advantages([group("abcd", rewards=[[1.0], [1.0], [0.0], [0.0]])], alg.grpo(), torch.ones(1))[0]
    torch.testing.assert_close(torch.cat([judged[0].advantages, judged[2].advantages]), whole.advantages)
    assert judged[0].advantages.min() > 0 > judged[2].advantages.max()  # alone, both groups are tied and teach nothing
    assert [one.prompt.uid for one in judged] == [one.prompt.uid for one in parts]


def test_a_run_shares_its_completions_out_among_the_languages(tmp_path: Path):
    seen: list[str] = []

    def reward(completions: list[str], language: list[str], **columns: Any) -> list[float]:
        seen.extend(language)
        return [float(len(one)) + (code == "de") for one, code in zip(completions, language, strict=True)]

    options = {"group_languages": ["en", "de"], "metrics_by": ["language"], "max_steps": 2}
    trainer(tmp_path / "run", train_dataset=Dataset.from_list(ROWS), reward_funcs=reward, **options).train()
    assert (seen.count("en"), seen.count("de")) == (8, 8)  # 2 steps of 2 questions, 2 completions a language
    assert {"reward/language=en", "reward/language=de/low"} <= set(lines(tmp_path / "run")[0])


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"group_languages": ["en", "fr", "it"], "num_generations": 4}, DataError, "prompt_en, prompt_fr, prompt_it are missing"),
        ({"group_languages": ["en", "de", "zh"], "num_generations": 4}, ConfigError, "do not share out among 3 languages; take 3 or 6"),
        ({"group_languages": ["en", "de"], "dynamic_sampling": 1}, ConfigError, "which dynamic_sampling does not"),
        ({"group_languages": ["en"]}, ConfigError, "at least two languages"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        trainer(tmp_path / "run", train_dataset=Dataset.from_list(ROWS), **options).train()
