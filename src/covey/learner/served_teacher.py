"""Teacher of a distillation behind an OpenAI-compatible endpoint, which returns its top-k tokens with log-probabilities."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.errors import ConfigError, RewardError, ServerError
from covey.learner.packing import PaddedRows, Row
from covey.learner.policy import Policy
from covey.learner.shared_prompt import SharedRows
from covey.learner.signals import Likeliest, Share, Signal
from covey.learner.teacher import Hints, Teacher, Teachers, places_of, share_of_text, signal_of
from covey.learner.text_alignment import Aligned, TextAlignment
from covey.rewards.builtin.chat_endpoint import Endpoint, all_of
from covey.types import Prompt, StepReport

logger = logging.getLogger(__name__)

NAMED = "token_id:"
"""Prefix of a token that a server names by its id."""
Ranked = tuple[list[int], list[float], float]
"""Top-k tokens at one position, their log-probabilities, and that of the token that stands there."""


@dataclass(eq=False)
class ServedTeacher:
    """Teacher model on a server. `echo` of /v1/completions scores the policy's tokens: one request per completion and update."""

    endpoint: Endpoint
    top_k: int
    distance: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(logp [m, V], the teacher's likeliest tokens [m, k], their log-probabilities [m, k]) -> [m]; None: no distance."""
    hints: Hints | None = None
    hinted: Callable[[Prompt, str], tuple[int, ...]] = lambda prompt, hint: prompt.token_ids
    """Token ids of the prompt with the hint inserted."""
    overlap_k: int | None = None
    """Measure the share of the k likeliest tokens that it has in common with the policy; None: not."""
    alignment: TextAlignment | None = None
    """Its own tokenizer, for a teacher that reads other tokens than the policy writes. None: they are the same."""
    check_stop: Callable[[], None] = lambda: None
    """Callback while requests are pending; its exception ends the wait."""
    skips: bool = False
    """True: training goes on without the signal on completions that got no answer; False: ServerError is raised."""
    is_away: bool = field(default=False, init=False)
    """True if it did not answer last: then one request tries it, once, before the others are sent."""

    def at(self, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Signal:
        """The teacher's top-k tokens at the policy's positions: `rows`, in the order of `packed`. Raises ServerError."""
        return signal_of(self, packed, rows)

    def speak(
        self, packed: PaddedRows | SharedRows, rows: Sequence[Row], chosen: Sequence[int] | None, share: float
    ) -> tuple[Share, list[bool]]:
        """The teacher at the positions of the chosen rows, by default of all, and for each of these True if it answered."""
        chosen = range(len(rows)) if chosen is None else chosen
        mine = [rows[i] for i in chosen]
        context = packed.context if isinstance(packed, SharedRows) else None
        ask = partial(self._answers, mine)
        answers = ask() if context is None else context.of_first(ask)
        informed = [answer is not None for answer in answers]
        if self.alignment is not None:
            return self._share_of_text(packed, mine, answers, chosen, share), informed
        shape = (len(mine), packed.shape[1])
        ids = torch.zeros(*shape, self.top_k, dtype=torch.long)
        logp = torch.full((*shape, self.top_k), -torch.inf)
        logp[..., 0] = 0.0  # where it says nothing: one sure token, so that no number is infinite
        drawn_logp = torch.zeros(shape)
        for n, answer in enumerate(answers):
            for t, (tokens, values, value) in enumerate(answer or ()):
                ids[n, t, : len(tokens)] = torch.tensor(tokens)
                logp[n, t] = -torch.inf
                logp[n, t, : len(values)] = torch.tensor(values)
                drawn_logp[n, t] = value
        places, flat = places_of(packed, chosen)
        there = lambda x: x.flatten(0, 1)[flat].to(packed.place.device)
        other = None if self.distance is None else Likeliest(there(ids), there(logp), self.distance, self.overlap_k)
        return Share(places.to(packed.place.device), other, share, there(drawn_logp)), informed

    def _share_of_text(
        self,
        packed: PaddedRows | SharedRows,
        rows: Sequence[Row],
        answers: Sequence[list[Ranked] | None],
        chosen: Sequence[int],
        share: float,
    ) -> Share:
        """The share of a teacher of another tokenizer: log-probabilities of the spans of text that both share."""
        assert self.alignment is not None
        aligned = [
            Aligned((), ()) if answer is None else self.alignment(row)
            for row, answer in zip(rows, answers, strict=True)
        ]
        logp = [torch.tensor([value for _, _, value in answer or ()], dtype=torch.float64) for answer in answers]
        return share_of_text(packed, aligned, logp, chosen, share)

    def _answers(self, rows: Sequence[Row]) -> list[list[Ranked] | None]:
        """Answers on each completion; None where the server gave none and the run goes on without."""
        work = [partial(self.likeliest, *self._ids(row)) for row in rows]
        if not self.skips:
            return self.run_all(work)
        if self.is_away and self.run_all([partial(self._tried, partial(work[0], is_trial=True))]) == [None]:
            return [None] * len(rows)
        answers: list[list[Ranked] | None] = self.run_all([partial(self._tried, call) for call in work])
        was_away, self.is_away = self.is_away, all(answer is None for answer in answers)
        lost = sum(answer is None for answer in answers)
        if lost and not was_away:
            logger.warning(
                "The teacher %s did not answer on %d of %d completions; they are trained without its signal "
                "(teacher/informed says how many), and it is asked again at each step.",
                self.endpoint.model,
                lost,
                len(rows),
            )
        return answers

    def _tried(self, work: Callable[[], list[Ranked]]) -> list[Ranked] | None:
        """The result, or None where the server does not answer. Raises RewardError where it refuses the request."""
        try:
            return work()
        except (TimeoutError, ConnectionError):
            return None

    def run_all(self, work: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of concurrent requests. Raises ConfigError where the server refuses them, ServerError where it does not answer."""
        try:
            return all_of(work, self.check_stop)
        except RewardError as error:
            raise ConfigError(str(error)) from error
        except (TimeoutError, ConnectionError) as error:
            raise ServerError(f"{error}. Start the teacher's server again, and resume the run.") from error

    def likeliest(self, prompt: Sequence[int], completion: Sequence[int], is_trial: bool = False) -> list[Ranked]:
        """The `top_k` likeliest tokens at each position of a completion, in descending order, and the completion's own."""
        ids = [*prompt, *completion]
        read = partial(_tops, ids=ids, count=len(completion), top_k=self.top_k)
        ranked: list[Ranked] = self._echoed(ids, read, is_trial, logprobs=self.top_k, return_tokens_as_token_ids=True)
        return ranked

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The server's texts of single tokens."""
        tokens: list[str] = self._echoed(
            ids, lambda body: [str(token) for token in _logprobs(body)["tokens"]], logprobs=1
        )
        return tokens

    def _echoed(self, ids: Sequence[int], read: Callable[[bytes], Any], is_trial: bool = False, **options: Any) -> Any:
        body = {"model": self.endpoint.model, "prompt": list(ids), "max_tokens": 0, "echo": True, **options}
        endpoint = replace(self.endpoint, retries=0) if is_trial else self.endpoint
        until = time.monotonic() + endpoint.request_seconds * (endpoint.retries + 1)
        return endpoint.post("completions", body, read, until)[0]

    def _ids(self, row: Row) -> tuple[tuple[int, ...], list[int]]:
        if self.alignment is not None:
            aligned = self.alignment(row)
            return aligned.prompt, list(aligned.completion)
        ids = row.prompt.token_ids if row.hint is None else self.hinted(row.prompt, row.hint)
        return ids, row.completion.token_ids.tolist()

    @property
    def is_split(self) -> bool:
        return False

    def follow(self, policy: Policy, report: StepReport) -> None:
        """Nothing: it is a model of its own."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


AnyTeacher = Teacher | Teachers | ServedTeacher


def _logprobs(body: bytes) -> dict[str, Any]:
    """Log-probabilities in an answer. Raises RewardError where there are none."""
    try:
        logprobs = json.loads(body)["choices"][0]["logprobs"]
        if not isinstance(logprobs["tokens"], list) or not isinstance(logprobs["top_logprobs"], list):
            raise TypeError("no lists")
    except (ValueError, LookupError, TypeError) as error:
        raise RewardError(
            "The teacher's server does not score a prompt (echo with logprobs in /v1/completions); vLLM and covey serve do."
        ) from error
    return dict(logprobs)


def _tops(body: bytes, ids: Sequence[int], count: int, top_k: int) -> list[Ranked]:
    """The likeliest tokens at the last `count` of `ids`. Raises RewardError for an answer about other tokens, or without their ids."""
    logprobs = _logprobs(body)
    if [str(token_name) for token_name in logprobs["tokens"][: len(ids)]] != [f"{NAMED}{token_id}" for token_id in ids]:
        raise RewardError(
            "The teacher's server does not name tokens by id (return_tokens_as_token_ids); vLLM and covey serve do."
        )
    span = slice(len(ids) - count, len(ids))
    ranked = [sorted(place.items(), key=lambda item: -item[1])[:top_k] for place in logprobs["top_logprobs"][span]]
    names = [[int(name.removeprefix(NAMED)) for name, _ in best] for best in ranked]
    values = [[value for _, value in best] for best in ranked]
    drawn = [
        place.get(f"{NAMED}{token}") for place, token in zip(logprobs["top_logprobs"][span], ids[span], strict=True)
    ]
    if any(value is None for value in drawn):
        raise RewardError(
            "The teacher's server leaves the prompt's own tokens out of top_logprobs; vLLM and covey serve do not."
        )
    return list(zip(names, values, map(float, drawn), strict=True))
