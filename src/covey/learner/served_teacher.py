"""Teacher of a distillation behind an OpenAI-compatible endpoint, which returns its top-k tokens with log-probabilities."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.errors import ConfigError, RewardError, ServerError
from covey.learner.logprobs import Likeliest
from covey.learner.packing import PaddedRows, Row
from covey.learner.shared_prompt import SharedRows
from covey.learner.teacher import Hints, Teacher
from covey.rewards.builtin.chat_endpoint import Endpoint, all_of
from covey.types import Prompt

NAMED = "token_id:"
"""Prefix of a token that a server names by its id."""
Ranked = tuple[list[int], list[float]]
"""Top-k tokens at one position, and their log-probabilities."""


@dataclass(frozen=True, eq=False)
class ServedTeacher:
    """Teacher model on a server. `echo` of /v1/completions scores the policy's tokens: one request per completion and update."""

    endpoint: Endpoint
    top_k: int
    distance: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(logp [m, V], the teacher's likeliest tokens [m, k], their log-probabilities [m, k]) -> [m]"""
    hints: Hints | None = None
    hinted: Callable[[Prompt, str], tuple[int, ...]] = lambda prompt, hint: prompt.token_ids
    """Token ids of the prompt with the hint inserted."""
    check_stop: Callable[[], None] = lambda: None
    """Callback while requests are pending; its exception ends the wait."""

    def at(self, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Likeliest:
        """The teacher's top-k tokens at the policy's positions: `rows`, in the order of `packed`. Raises ServerError."""
        answers = self.asked([partial(self.likeliest, *self._ids(row)) for row in rows])
        ids = torch.zeros(*packed.shape, self.top_k, dtype=torch.long)
        logp = torch.full((*packed.shape, self.top_k), -torch.inf)
        for n, answer in enumerate(answers):
            for t, (tokens, values) in enumerate(answer):
                ids[n, t, : len(tokens)] = torch.tensor(tokens)
                logp[n, t, : len(values)] = torch.tensor(values)
        flat = lambda x: x.flatten(0, 1).to(packed.place.device)[packed.place]
        return Likeliest(flat(ids), flat(logp), self.distance)

    def asked(self, work: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of concurrent requests. Raises ConfigError where the server refuses them, ServerError where it does not answer."""
        try:
            return all_of(work, self.check_stop)
        except RewardError as error:
            raise ConfigError(str(error)) from error
        except (TimeoutError, ConnectionError) as error:
            raise ServerError(f"{error}. Start the teacher's server again, and resume the run.") from error

    def likeliest(self, prompt: Sequence[int], completion: Sequence[int]) -> list[Ranked]:
        """The `top_k` likeliest tokens at each position of a completion, in descending order."""
        ids = [*prompt, *completion]
        read = partial(_tops, ids=ids, count=len(completion), top_k=self.top_k)
        return self._echoed(ids, read, logprobs=self.top_k, return_tokens_as_token_ids=True)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The server's texts of single tokens."""
        return self._echoed(ids, lambda body: [str(one) for one in _logprobs(body)["tokens"]], logprobs=1)

    def _echoed(self, ids: Sequence[int], read: Callable[[bytes], Any], **options: Any) -> Any:
        body = {"model": self.endpoint.model, "prompt": list(ids), "max_tokens": 0, "echo": True, **options}
        until = time.monotonic() + self.endpoint.request_seconds * (self.endpoint.retries + 1)
        return self.endpoint.post("completions", body, read, until)[0]

    def _ids(self, row: Row) -> tuple[tuple[int, ...], list[int]]:
        told = row.prompt.token_ids if row.hint is None else self.hinted(row.prompt, row.hint)
        return told, row.completion.token_ids.tolist()


AnyTeacher = Teacher | ServedTeacher


def _logprobs(body: bytes) -> dict[str, Any]:
    """Log-probabilities in an answer. Raises RewardError where there are none."""
    try:
        found = json.loads(body)["choices"][0]["logprobs"]
        if not isinstance(found["tokens"], list) or not isinstance(found["top_logprobs"], list):
            raise TypeError("no lists")
    except (ValueError, LookupError, TypeError) as error:
        raise RewardError(
            "The teacher's server does not score a prompt (echo with logprobs in /v1/completions); vLLM and covey serve do."
        ) from error
    return dict(found)


def _tops(body: bytes, ids: Sequence[int], count: int, top_k: int) -> list[Ranked]:
    """The likeliest tokens at the last `count` of `ids`. Raises RewardError for an answer about other tokens, or without their ids."""
    found = _logprobs(body)
    if [str(one) for one in found["tokens"][: len(ids)]] != [f"{NAMED}{one}" for one in ids]:
        raise RewardError(
            "The teacher's server does not name tokens by id (return_tokens_as_token_ids); vLLM and covey serve do."
        )
    places = found["top_logprobs"][len(ids) - count : len(ids)]
    ranked = [sorted(place.items(), key=lambda item: -item[1])[:top_k] for place in places]
    return [([int(name.removeprefix(NAMED)) for name, _ in best], [value for _, value in best]) for best in ranked]
