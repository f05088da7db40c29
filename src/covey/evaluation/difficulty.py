"""Difficulty of prompts: how often a model solves each, for a curriculum from easy to hard."""

from typing import Any

from covey.data import PromptStream
from covey.evaluation.assessment import scored_answers, totals
from covey.evaluation.intervals import finite_mean
from covey.rewards import Scorer
from covey.rollout import Sampler, SamplingParams
from covey.types import reaches


def pass_rates(
    dataset: Any,
    *,
    sampler: Sampler,
    scorer: Scorer,
    tokenizer: Any,
    sampling: SamplingParams,
    num_samples: int = 8,
    threshold: float = 0.5,
    batch_size: int = 128,
    max_prompt_length: int | None = None,
) -> list[float]:
    """[N], the share of `num_samples` drawn answers of each prompt of a data set whose reward is `threshold` or more.

    NaN where no reward scored any. The same seed gives the same answers.
    """
    scorer.check(dataset.column_names)
    stream = PromptStream(dataset, tokenizer, shuffle=False, keeps_shares=False, max_prompt_length=max_prompt_length)
    rates = []
    for group in scored_answers(sampler, scorer, stream.take(len(dataset)), num_samples, sampling, batch_size):
        rewards = totals(group, scorer)
        rates.append(finite_mean(x if x != x else float(reaches(x, threshold)) for x in rewards))
    return rates
