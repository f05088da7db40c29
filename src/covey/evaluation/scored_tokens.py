"""Log-probabilities that a server gives fixed tokens, in each form that vLLM, SGLang, TGI and OpenAI-compatible servers have.

A server has no endpoint that says which forms it takes, so they are tried in order, and the first that answers is used from then on.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import ServerError
from covey.rollout.vllm.client import Client, RefusedError

GENERATED = 32
"""Tokens of a completion that is scored where the server scores no prompts."""


class Unscored(Exception):  # noqa: N818  # control flow: the next form is tried
    """The server's answer holds no log-probabilities in this form."""


@dataclass(frozen=True)
class ScoredTokens:
    """Token ids [L], and the server's log-probability of each: None for the first, and for tokens that it did not score."""

    ids: tuple[int, ...]
    logp: tuple[float | None, ...]


Ask = Callable[["TokenScorer", Sequence[int]], ScoredTokens]


@dataclass(eq=False)
class TokenScorer:
    """Asks one model of a server for log-probabilities. `form`: the form that worked, None before the first answer."""

    client: Client
    model: str
    tokenizer: Any
    form: str | None = None

    def score(self, ids: Sequence[int]) -> ScoredTokens:
        """The server's log-probabilities of these tokens. Raises ServerError if it scores none, or does not answer."""
        refusals = []
        for name, ask in FORMS.items() if self.form is None else ((self.form, FORMS[self.form]),):
            try:
                scored = ask(self, ids)
            except RefusedError as error:
                if error.status in (401, 403):
                    raise
                refusals.append(f"{name}: {error}")
            except (Unscored, LookupError, TypeError, ValueError, AttributeError) as error:
                refusals.append(f"{name}: no log-probabilities ({type(error).__name__})")
            else:
                self.form = name
                return scored
        raise ServerError(
            f"{self.client.address} gives no log-probabilities of {self.model} in any form that is known here. Start it so that "
            f"/v1/completions takes logprobs. It answered: {' | '.join(refusals)}"
        )

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.client.post(path, body, seconds=self.client.deadlines.probe)


def _prompt_logprobs(scorer: TokenScorer, ids: Sequence[int]) -> ScoredTokens:
    """vLLM: `prompt_logprobs`, a list with None first, then a mapping from token id to its entry."""
    body = {"model": scorer.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    places = scorer.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    values = [None if place is None else place[str(token)]["logprob"] for place, token in zip(places, ids, strict=True)]
    return _check(ids, values)


def _echo(scorer: TokenScorer, ids: Sequence[int]) -> ScoredTokens:
    """OpenAI's `echo` with `logprobs` on /v1/completions: the prompt's tokens come first."""
    body = {"model": scorer.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
    body |= {"echo": True, "logprobs": 1}
    values = scorer.post("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
    if len(values) < len(ids) or values[0] is not None:
        raise Unscored  # the completion's own log-probabilities: `echo` was ignored
    return _check(ids, values[: len(ids)])


def _input_token_logprobs(scorer: TokenScorer, ids: Sequence[int]) -> ScoredTokens:
    """SGLang: /generate with `return_logprob`, rows of [log-probability, token id, text]."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = scorer.post("/generate", body)
    rows = (answer[0] if isinstance(answer, list) else answer)["meta_info"]["input_token_logprobs"]
    return _check([row[1] for row in rows], [row[0] for row in rows], expected=ids)


def _prefill(scorer: TokenScorer, ids: Sequence[int]) -> ScoredTokens:
    """TGI: /generate with `decoder_input_details`. It takes text alone, so that its own tokens are the ones that are scored."""
    parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
    answer = scorer.post("/generate", {"inputs": scorer.tokenizer.decode(list(ids)), "parameters": parameters})
    rows = (answer[0] if isinstance(answer, list) else answer)["details"]["prefill"]
    return _check([row["id"] for row in rows], [row["logprob"] for row in rows])


def _generate(scorer: TokenScorer, ids: Sequence[int]) -> ScoredTokens:
    """A completion drawn with `logprobs`, up to the first token whose text several token ids share.

    At temperature 1, where raw and processed log-probabilities are the same.
    """
    body = {"model": scorer.model, "prompt": list(ids), "max_tokens": GENERATED, "temperature": 1.0}
    body |= {"seed": 0, "logprobs": 1}
    logprobs = scorer.post("/v1/completions", body)["choices"][0]["logprobs"]
    named = _ids_by_text(scorer.tokenizer)
    tokens: list[int] = []
    for text in logprobs["tokens"]:
        candidates = named.get(text, ())
        if len(candidates) != 1:
            break
        tokens.append(candidates[0])
    if not tokens:  # its first token's text is that of several ids
        return ScoredTokens(tuple(ids), (None,) * len(ids))
    return _check([*ids, *tokens], [*[None] * len(ids), *logprobs["token_logprobs"][: len(tokens)]])


FORMS: dict[str, Ask] = {
    "prompt_logprobs": _prompt_logprobs,
    "echo": _echo,
    "input_token_logprobs": _input_token_logprobs,
    "prefill": _prefill,
    "completion": _generate,
}
"""By name, from the most exact to the least."""


def _check(ids: Sequence[Any], values: Sequence[Any], expected: Sequence[int] | None = None) -> ScoredTokens:
    """Raises Unscored for numbers that are none, or log-probabilities of other tokens than those asked about."""
    tokens, logp = tuple(map(int, ids)), tuple(None if value is None else float(value) for value in values)
    if expected is not None and tokens != tuple(expected):
        raise Unscored
    scored = [value for value in logp[1:] if value is not None]
    if len(tokens) != len(logp) or not scored or not all(math.isfinite(value) and value <= 1e-3 for value in scored):
        raise Unscored
    return ScoredTokens(tokens, (None, *logp[1:]))


def _ids_by_text(tokenizer: Any) -> dict[str, list[int]]:
    named: dict[str, list[int]] = {}
    for token in range(len(tokenizer)):
        named.setdefault(tokenizer.decode([token]), []).append(token)
    return named
