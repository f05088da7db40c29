"""One model on one set of prompts, in full: greedy and sampled, with intervals; and two models side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.data import PromptStream
from covey.errors import ConfigError
from covey.evaluation.intervals import (
    Difference,
    Estimate,
    bounded_mean,
    finite_mean,
    mean,
    paired_difference,
    pass_at_k,
    proportion,
)
from covey.process.counting import tell
from covey.rewards import Scorer
from covey.rewards.metrics import totals_of
from covey.rollout import Sampler, SamplingParams
from covey.types import Group, Prompt, reaches


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Scores of a model on P prompts. NaN: no reward scored that prompt."""

    greedy: tuple[float, ...]
    """[P], weighted reward of the greedy answer."""
    sampled: tuple[tuple[float, ...], ...]
    """[P][n], weighted rewards of n drawn answers; empty when none were drawn."""
    texts: tuple[str, ...]
    """[P], the greedy answers."""
    mean_length: float
    """Tokens of a greedy answer."""
    threshold: float
    """An answer counts as right from this reward on."""

    @property
    def accuracy(self) -> Estimate:
        """Share of greedy answers that are right, with Wilson's interval. Prompts without a score are left out."""
        scored = [score for score in self.greedy if not math.isnan(score)]
        return proportion(sum(reaches(score, self.threshold) for score in scored), len(scored))

    @property
    def reward(self) -> Estimate:
        """Mean reward of the greedy answers; of rewards that are 0 or 1 its interval stays between them."""
        return _mean_reward(self.greedy, self.greedy)

    @property
    def sampled_reward(self) -> Estimate:
        """Mean over prompts of the mean reward of the drawn answers."""
        return _mean_reward(
            [finite_mean(scores) for scores in self.sampled], [x for scores in self.sampled for x in scores]
        )

    def pass_at(self, k: int) -> Estimate:
        """Mean over prompts of the unbiased pass@k of the drawn answers that were scored; prompts with fewer than `k` are left out."""
        scored = [[score for score in scores if not math.isnan(score)] for scores in self.sampled]
        right = [sum(reaches(score, self.threshold) for score in scores) for scores in scored]
        pairs = zip(scored, right, strict=True)
        return bounded_mean([pass_at_k(len(scores), count, k) for scores, count in pairs if len(scores) >= k])

    def part(self, start: int | None, stop: int | None) -> Assessment:
        """The same of prompts `start` to `stop` alone; `mean_length` stays that of all."""
        cut = slice(start, stop)
        return replace(self, greedy=self.greedy[cut], sampled=self.sampled[cut], texts=self.texts[cut])

    def right(self) -> list[float]:
        """[P], 1.0 where the greedy answer is right, NaN where it was not scored."""
        return [score if math.isnan(score) else float(reaches(score, self.threshold)) for score in self.greedy]

    def summary(self, ks: Sequence[int] = ()) -> dict[str, Any]:
        """Plain numbers for JSON: `accuracy`, `accuracy_interval`, `reward`, `pass@k`, ..."""
        out: dict[str, Any] = {"prompts": len(self.greedy), "mean_length": round(self.mean_length, 2)}
        estimates: dict[str, Estimate] = {"accuracy": self.accuracy, "reward": self.reward}
        if self.sampled:
            estimates["sampled_reward"] = self.sampled_reward
            estimates |= {f"pass@{k}": self.pass_at(k) for k in ks}
        for name, estimate in estimates.items():
            out[name] = round(estimate.value, 6)
            out[f"{name}_interval"] = [round(estimate.low, 6), round(estimate.high, 6)]
        return out


def assess(
    sampler: Sampler,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    num_samples: int = 0,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    threshold: float = 0.5,
    batch_size: int = 256,
    keep: Callable[[Sequence[Group]], None] = lambda groups: None,
) -> Assessment:
    """Answer every prompt once greedily and `num_samples` times by `sampling`, and score the answers.

    `keep`: receives the scored greedy answers. The same seed gives the same answers, so two models can be compared prompt by prompt. Raises ConfigError when no
    prompts are given.
    """
    if not prompts:
        raise ConfigError("there are no prompts to evaluate on; give a data set with at least one row.")
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    answers = list(scored_answers(sampler, scorer, prompts, 1, greedy, batch_size))
    keep(answers)
    drawn: list[Group] = []
    if num_samples:
        params = replace(sampling or SamplingParams(), max_tokens=max_tokens, seed=seed)
        drawn = list(scored_answers(sampler, scorer, prompts, num_samples, params, batch_size))
    lengths = [group.completions[0].num_tokens for group in answers]
    return Assessment(
        greedy=tuple(totals(group, scorer)[0] for group in answers),
        sampled=tuple(totals(group, scorer) for group in drawn),
        texts=tuple(group.completions[0].text for group in answers),
        mean_length=sum(lengths) / len(lengths),
        threshold=threshold,
    )


def compare(a: Assessment, b: Assessment) -> dict[str, Difference]:
    """Differences of B from A on the same prompts: `accuracy` (McNemar's exact test) and `reward`."""
    return {"accuracy": paired_difference(a.right(), b.right()), "reward": paired_difference(a.greedy, b.greedy)}


def scored_answers(
    sampler: Sampler, scorer: Scorer, prompts: Sequence[Prompt], n: int, params: SamplingParams, batch_size: int
) -> Iterator[Group]:
    """Scored groups in the order of the prompts."""
    per_turn = max(1, batch_size // n)
    what = f"prompts answered {n} times" if n > 1 else "prompts answered"
    tell(what, 0, len(prompts))
    for start in range(0, len(prompts), per_turn):
        turn = prompts[start : start + per_turn]
        place = {prompt.uid: i for i, prompt in enumerate(turn)}
        groups = sorted(sampler.sample(turn, n, params), key=lambda group: place[group.prompt.uid])
        yield from scorer.score(groups)
        tell(what, start + len(turn), len(prompts))


def totals(group: Group, scorer: Scorer) -> tuple[float, ...]:
    """Weighted reward of each completion of a scored group; NaN where no reward scored it."""
    return tuple(totals_of(group, scorer.weights).tolist())


def _mean_reward(values: Sequence[float], seen: Sequence[float]) -> Estimate:
    is_binary = all(math.isnan(score) or score in (0.0, 1.0) for score in seen)
    return bounded_mean(values) if is_binary and seen else mean(values)


def summary_of(differences: Mapping[str, Difference]) -> dict[str, Any]:
    """Plain numbers of a comparison, for JSON."""
    return {
        name: {
            "difference": round(d.value, 6),
            "interval": [round(d.low, 6), round(d.high, 6)],
            "p_value": d.p_value,
            "is_real": d.is_real,
            "prompts": d.count,
        }
        for name, d in differences.items()
    }


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
