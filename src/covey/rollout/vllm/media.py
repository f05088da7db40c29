"""Images, sounds and videos of prompts on their way to a vLLM server: the learner's own tensors, sent once, with the same token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from covey.errors import AttestationError, ConfigError, DataError, ServerError
from covey.models.modalities import refuse_loose_places
from covey.rollout.agreement import gap_of
from covey.rollout.vllm.client import Client, RefusedError
from covey.rollout.vllm.worker.covey_media import COMPLETIONS, TENSORS
from covey.types import Prompt


def complete(client: Client, prompt: Prompt, body: dict[str, Any], weights: str) -> Any:
    """The server's answer to a request of completions. `weights`: the label of those that it serves.

    Raises DataError where the server does not take the prompt's media.
    """
    post = lambda path, body: client.post(path, body, seconds=client.deadlines.generation)
    if prompt.media is None:
        return post("/v1/completions", body)
    content = packed(prompt)
    named = {"media": hashlib.sha256(content).hexdigest(), "media_count": prompt.media.count, "media_weights": weights}
    try:
        return post(COMPLETIONS, {**body, **named})
    except RefusedError as error:
        if error.status == HTTPStatus.BAD_REQUEST:
            raise DataError(f"vLLM does not take prompt {prompt.uid} with its images or sounds: {error}") from error
        if error.status != HTTPStatus.GONE:
            raise
    post(TENSORS, content)
    return post(COMPLETIONS, {**body, **named})


def score(client: Client, prompt: Prompt, model: str, weights: str) -> Tensor:
    """[L - 1] the server's log-probabilities of the prompt's tokens, of which the first has none."""
    body = {"model": model, "prompt": list(prompt.token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
    reply = complete(client, prompt, body, weights)
    try:
        entries = zip(prompt.token_ids[1:], reply["choices"][0]["prompt_logprobs"][1:], strict=True)
        return torch.tensor([float(tokens[str(token)]["logprob"]) for token, tokens in entries])
    except (TypeError, LookupError, ValueError) as error:
        raise ServerError(
            f"The server at {client.address} gives no prompt_logprobs of a prompt with images."
        ) from error


def expect_near(theirs: Tensor, mine: Tensor, *, is_sharp: bool) -> None:
    """Raise AttestationError where log-probabilities of a prompt with media are further apart than by rounding."""
    gap, limit = gap_of(theirs, mine, is_sharp=is_sharp)
    if not gap <= limit:
        raise AttestationError(
            f"vLLM computes images or sounds otherwise than the learner: its log-probabilities of a prompt with one are {gap:.3g} nats "
            f"from the learner's, where {limit:g} is rounding; leave use_vllm out, so that the native engine reads them."
        )


def packed(prompt: Prompt) -> bytes:
    """The tensors of a prompt's media as a safetensors file."""
    from safetensors.torch import save

    assert prompt.media is not None
    return save({name: value.contiguous() for name, value in sorted(prompt.media.tensors.items())})


def expect_media_taken(client: Client, prompts: Sequence[Prompt], banned: Sequence[int]) -> None:
    """Raise ConfigError where a prompt has media and the server takes none with token ids, DataError for media that were lost."""
    refuse_loose_places(prompts, banned)
    if all(prompt.media is None for prompt in prompts):
        return
    try:
        reply = client.get(COMPLETIONS)
    except RefusedError:
        reply = None
    if not isinstance(reply, dict) or reply.get("media") is not True:
        raise ConfigError(
            f"The server at {client.address} takes no images or sounds beside token ids; start it with covey serve-vllm, which adds that."
        )
