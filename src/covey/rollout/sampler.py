"""The `Sampler` interface and its sampling parameters."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from covey.errors import ConfigError
from covey.rollout.prompts import PromptLike
from covey.types import Group, Mean, Metric

DEFAULT_ROWS = 256
"""Default number of completions decoded at once."""
_LEAST = 1e-4
"""Temperature (0 is greedy) and penalty at least, and one over it at most: float32 does not hold logits over much less."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. `SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=1)`.

    The distribution is processed in this order: repetition penalty, temperature, top-k, top-p, min-p; vLLM takes min-p before top-k.
    Log-probabilities are those of the resulting distribution. A seed gives the same completions in any batch.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    """0 means greedy: the likeliest token, its log-probability at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float | None = None
    """Leave out tokens less likely than this fraction of the likeliest one."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the completion so far are divided (positive) or multiplied (negative) by it."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings, which stays in it."""
    seed: int | None = None
    """None: drawn from torch's default generator."""

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for is_right, sentence in self._checks():
            if not is_right:
                raise ConfigError(sentence)

    def _check_types(self) -> None:
        for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"):
            value = getattr(self, name)
            is_whole = name in ("max_tokens", "top_k", "seed")
            if value is None and name in ("min_p", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
                raise ConfigError(f"{name} is {value!r}; give a {'whole ' if is_whole else ''}number.")
        stop = self.stop
        if not isinstance(stop, str) and not (
            isinstance(stop, Sequence) and all(isinstance(text, str) for text in stop)
        ):
            raise ConfigError(f"stop is {stop!r}; give a text, or a list of texts.")

    def _checks(self) -> list[tuple[bool, str]]:
        min_p = 0.0 if self.min_p is None else self.min_p
        return [
            (self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; a completion needs at least 1 token."),
            (
                _LEAST <= (self.temperature or 1.0) <= 1 / _LEAST,
                f"temperature is {self.temperature}; give 0 for greedy decoding or a number from {_LEAST} to {1 / _LEAST:g}.",
            ),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}; give a probability in (0, 1], 1 to keep everything."),
            (self.top_k >= 0, f"top_k is {self.top_k}; give a count of tokens, 0 to keep all of them."),
            (0 <= min_p <= 1, f"min_p is {self.min_p}; give a fraction in [0, 1], or None to keep everything."),
            (
                _LEAST <= self.repetition_penalty <= 1 / _LEAST,
                f"repetition_penalty is {self.repetition_penalty}; give a number from {_LEAST} to {1 / _LEAST:g}, 1 for no penalty.",
            ),
            (all(self.stop), "stop holds an empty string, which ends every completion at once; leave it out."),
        ]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p removes tokens from the distribution."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)


class Sampler(Protocol):
    """Generator of completions from the policy's weights; asynchronous and remote samplers have the same interface."""

    @property
    def check_stop(self) -> Callable[[], None]:
        """Callback between tokens; its exception ends the sampling."""

    def load(self, policy: nn.Module, version: int) -> None:
        """Sample with these weights from now on; completions carry `version`."""

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish: not always in the order of the prompts."""


class TokenSampler(Sampler, Protocol):
    """A sampler that draws tokens itself, by weights of one version at a time."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end a completion."""

    @property
    def version(self) -> int: ...


def sampler_metrics(sampler: Any) -> dict[str, Metric]:
    """Metrics of a sampler and of the samplers that it wraps since the last call; empty if they measure none."""
    take = getattr(sampler, "take_metrics", None)
    if take is None:
        inner = getattr(sampler, "sampler", None)
        return {} if inner is None else sampler_metrics(inner)
    return dict(take())


def close_sampler(sampler: Any) -> None:
    """Close what a sampler has open, such as workers or an agent's endpoint; most have nothing."""
    close = getattr(sampler, "close", None)
    if close is not None:
        close()


def update_metrics(seconds: float, num_bytes: int) -> dict[str, Metric]:
    """Metrics of one update of a sampler's weights: its seconds, and the bytes that were copied or sent."""
    return {"weights/seconds": Mean(seconds, 1), "weights/mb": Mean(num_bytes / 1e6, 1)}


_GAINS_BY_THREADS = 500_000
"""Weights from which several threads gain decoding more than 5% on idle cores; on busy ones they cost a small model nine tenths."""


@contextmanager
def decoding_threads(model: nn.Module) -> Iterator[None]:
    """One thread inside for a model too small to gain by several; torch's number is restored on exit."""
    threads, left = torch.get_num_threads(), _GAINS_BY_THREADS
    for parameter in model.parameters() if threads > 1 else ():
        left -= parameter.numel()
        if left < 0:
            break
    if threads == 1 or left < 0:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
