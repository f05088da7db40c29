"""Groups that wait for the engine, and groups that it decodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from covey.rollout.forward import Forward
from covey.rollout.kv_cache import rounded
from covey.types import Prompt


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
    slot: int
    output_rows: list[int]
    written: dict[int, tuple[int, bool]]
    """Length of each finished completion by output row, and whether it ended by itself."""
    version: int
    """Version of the weights with which it started."""
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Weight changes during generation, by output row."""
    prompt_experts: Tensor | None = None
    """[prompt's tokens - 1, L, k], experts of the prompt's tokens, if they are recorded."""
