"""Difficulty of prompts: how often a model solves each, for a curriculum from easy to hard."""

from dataclasses import dataclass
from typing import Any

from covey.data import PromptStream
from covey.evaluation.assessment import scored_answers, totals
from covey.rewards import Scorer
from covey.rollout import Sampler, SamplingParams
from covey.types import reaches


@dataclass(frozen=True, eq=False)
class PassRates:
    """Called with a data set: [N], the share of `num_samples` drawn answers of each prompt whose reward is `threshold` or more.

    NaN where no reward scored any. The same seed gives the same answers.
    """

    sampler: Sampler
    scorer: Scorer
    tokenizer: Any
    sampling: SamplingParams
    num_samples: int = 8
    threshold: float = 0.5
    batch_size: int = 128
    max_prompt_length: int | None = None

    def __call__(self, dataset: Any) -> list[float]:
        self.scorer.check(dataset.column_names)
        limit = self.max_prompt_length
        stream = PromptStream(dataset, self.tokenizer, shuffle=False, keeps_shares=False, max_prompt_length=limit)
        prompts = stream.take(len(dataset))
        rates = []
        for group in scored_answers(
            self.sampler, self.scorer, prompts, self.num_samples, self.sampling, self.batch_size
        ):
            scores = [score for score in totals(group, self.scorer) if score == score]
            right = sum(reaches(score, self.threshold) for score in scores)
            rates.append(right / len(scores) if scores else float("nan"))
        return rates
