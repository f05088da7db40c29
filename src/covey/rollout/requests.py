"""Groups that wait for the engine, and groups that it decodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from covey.rollout.environments import Answer
from covey.rollout.forward import Forward
from covey.rollout.kv_cache import rounded
from covey.rollout.stopping import check_finite, completion
from covey.types import Completion, Media, Prompt

TOKEN, POSITION, WRITTEN, LIMIT, OUTPUT_ROW, SLOT = range(6)
"""Columns of the row table: next input token, its position, tokens generated, token limit, output row, and the prompt's slot in
the KV cache."""


@dataclass(frozen=True)
class GroupRequest:
    """A group to generate."""

    prompt: Prompt
    keys: tuple[int, ...]
    """RNG key of each completion."""
    limit: int
    """Most tokens of a completion."""

    def cache_bytes(self, forward: Forward) -> int:
        """Upper bound of its KV cache in bytes: the prompt once, and every completion at full length."""
        per_token = sum(layer.bytes_per_token(forward.dtype) for layer in forward.layers)
        states = 0 if forward.states is None else len(self.keys) * forward.states.nbytes
        return states + per_token * (rounded(len(self.prompt.token_ids)) + len(self.keys) * rounded(self.limit))


def prefill_batches(requests: Sequence[GroupRequest], most: int, *, is_padded: bool) -> Iterator[range]:
    """Places of the prompts that are prefilled together: at most `most` tokens, padding included, or one prompt.

    A prompt with media is alone. Without `is_padded`, prompts are of one length.
    """
    start, stop, longest = 0, 0, 0
    while start < len(requests):
        while stop < len(requests):
            length, has_media = len(requests[stop].prompt.token_ids) - 1, requests[stop].prompt.media is not None
            is_other = has_media or not (is_padded or length == longest)
            longest = max(longest, length)
            if stop > start and (is_other or longest * (stop + 1 - start) > most):
                break
            stop += 1
            if has_media:
                break
        yield range(start, stop)
        start, longest = stop, 0


@dataclass(eq=False)
class RunningGroup:
    """A group that is being decoded."""

    request: GroupRequest
    output_rows: list[int]
    written: dict[int, tuple[int, bool]]
    """Length of each finished completion by output row, and whether it ended by itself."""
    version: int
    """Version of the weights with which it started."""
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Weight changes during generation, by output row."""
    media: dict[int, Media] = field(default_factory=dict)
    """Images, sounds and videos of prompt and replies by output row, where a reply has any."""
    last_step: int = 0
    """Decode step of the scheduler by which all its rows have ended; counted on static buffers alone."""
    prompt_experts: Tensor | None = None
    """[prompt's tokens - 1, L, k], experts of the prompt's tokens, if they are recorded."""

    def answered(self, output_row: int, written: Sequence[int], answer: Answer) -> Prompt:
        """The prompt, what is `written` of a completion, and an answer to it with media, which are the row's from now on."""
        prompt = self.request.prompt
        before = (*prompt.token_ids, *written)
        assert answer.media is not None
        self.media[output_row] = answer.media.behind(self.media.get(output_row, prompt.media), len(before))
        return replace(prompt, token_ids=(*before, *answer.token_ids), media=self.media[output_row])

    def completions(
        self, tokens: Tensor, logprobs: Tensor, experts: Tensor | None, replies: Tensor | None, tokenizer: Any
    ) -> tuple[Completion, ...]:
        """Its completions from the tables of output rows [rows, T], copied: they are reused next. `replies` is negative where none stands."""
        longest = max(length for length, _ in self.written.values())
        take: Any = lambda table: None if table is None else table[self.output_rows, :longest].cpu()
        tokens, logprobs, experts, replies = take(tokens), take(logprobs), take(experts), take(replies)
        read = self.prompt_experts
        if read is None and experts is not None:  # a prompt of one token
            read = experts.new_zeros(0, *experts.shape[2:])
        check_finite(logprobs)  # beyond a completion's end stand zeros, or values that were checked before
        return tuple(
            completion(
                tokens[i, :length].clone(),
                logprobs[i, :length].clone(),
                "stop" if stopped else "length",
                tokenizer=tokenizer,
                version=self.version,
                versions=self.spans.get(output_row, ()),
                mask=None if replies is None else replies[i, :length] < 0,
                experts=None if experts is None else experts[i, :length].clone(),
                prompt_experts=read,
                media=self.media.get(output_row),
            )
            for i, output_row in enumerate(self.output_rows)
            for length, stopped in [self.written[output_row]]
        )
