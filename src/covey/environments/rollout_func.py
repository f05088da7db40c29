"""`rollout_func` by TRL's contract: the user's own function writes the completions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from covey.data.media import items_of, with_items
from covey.errors import DataError
from covey.rollout import Sampler, SamplingParams
from covey.rollout.prompts import PromptLike
from covey.types import Completion, Group, Prompt

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")


class RolloutFuncSampler:
    """A sampler whose completions `function(prompts, trainer)` writes.

    It gets each prompt once for each of its `n` completions and returns a dict with `prompt_ids`, `completion_ids` and
    `logprobs` (None, or a list for each completion), and optionally `env_mask` (0 where the model did not write the token).
    The messages of a prompt with images or sounds hold these, and its `prompt_ids` are those of its processor.
    Further keys, one value a completion, reach the rewards by name. Raises DataError for anything else, and for log-probabilities
    that are all 0: placeholders, which would weight the loss by almost nothing.
    """

    def __init__(
        self, sampler: Sampler, function: Callable[..., Any], trainer: Any, tokenizer: Any, eos_ids: Sequence[int]
    ) -> None:
        self.sampler, self.function, self.trainer = sampler, function, trainer
        self.tokenizer, self.eos_ids, self.version = tokenizer, frozenset(eos_ids), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def load(self, policy: Any, version: int) -> None:
        """From now on sample with these weights; completions carry `version`."""
        self.version = version
        self.sampler.load(policy, version)

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, in order."""
        encoded = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        raw_prompts = [_with_media(prompt) for prompt in encoded for _ in range(n)]
        output = self._checked(self.function(raw_prompts, self.trainer), len(raw_prompts))
        extra = {name: values for name, values in output.items() if name not in (*_NEEDED, "env_mask")}
        groups = []
        for p, prompt in enumerate(encoded):
            rows = range(p * n, (p + 1) * n)
            ids = tuple(output["prompt_ids"][rows[0]])
            if any(tuple(output["prompt_ids"][i]) != ids for i in rows):
                raise DataError(
                    f"rollout_func gave completions of prompt {prompt.uid} different prompt_ids; a group has one prompt, so put "
                    "what differs into completion_ids, with env_mask 0."
                )
            if prompt.media is not None and ids != prompt.token_ids:
                raise DataError(
                    f"rollout_func gave prompt {prompt.uid} {len(ids)} prompt_ids that are not the {len(prompt.token_ids)} of its processor, so "
                    "its images or sounds would not be where they belong; return those of "
                    "trainer.processing_class.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)."
                )
            completions = tuple(self._completion(output, extra, i, params) for i in rows)
            groups.append(Group(prompt=replace(prompt, token_ids=ids), completions=completions))
        _expect_chances(completion for group in groups for completion in group.completions)
        yield from groups

    def _completion(
        self, output: Mapping[str, Any], extra: Mapping[str, Any], i: int, params: SamplingParams
    ) -> Completion:
        ids = torch.as_tensor(list(output["completion_ids"][i]), dtype=torch.int64)
        if not set(getattr(self.sampler, "banned", ())).isdisjoint(ids.tolist()):
            raise DataError(
                f"rollout_func gave completion {i} a token that stands for an image or a sound, which no completion may hold; bar it with "
                "suppress_tokens of generate."
            )
        logprobs = None if output["logprobs"] is None else output["logprobs"][i]
        mask = None if output.get("env_mask") is None else torch.as_tensor(list(output["env_mask"][i])).bool()
        for name, values in (("logprobs", logprobs), ("env_mask", mask)):
            if values is not None and len(values) != len(ids):
                raise DataError(
                    f"rollout_func gave completion {i} {len(ids)} completion_ids and {len(values)} {name}; give one for each token."
                )
        is_ended = bool(len(ids)) and int(ids[-1]) in self.eos_ids
        return Completion(
            token_ids=ids,
            text=self.tokenizer.decode(ids.tolist(), skip_special_tokens=True),
            finish="stop" if is_ended or len(ids) < params.max_tokens else "length",
            logprobs=None if logprobs is None else _numbers(logprobs, i),
            mask=mask,
            version=self.version,
            columns={name: values[i] for name, values in extra.items()},
        )

    def _checked(self, output: Any, count: int) -> Mapping[str, Any]:
        """The output, where it has the keys and one entry a completion."""
        if not isinstance(output, Mapping):
            raise DataError(
                f"rollout_func returned a {type(output).__name__}; return a dict with {', '.join(_NEEDED)}."
            )
        missing = [name for name in _NEEDED if name not in output]
        if missing:
            raise DataError(f"rollout_func returned no {', '.join(missing)}; it has {', '.join(map(str, output))}.")
        for name, values in output.items():
            if values is None and name in ("logprobs", "env_mask"):
                continue
            length = len(values) if hasattr(values, "__len__") else type(values).__name__
            if length != count:
                raise DataError(
                    f"rollout_func returned {length} {name} for {count} prompts; return one for each prompt it was given."
                )
        return output


def _expect_chances(completions: Iterable[Completion]) -> None:
    """Raise DataError where each of several tokens that the model wrote has the log-probability 0."""
    sure = [drawn.logprobs[drawn.written] == 0 for drawn in completions if drawn.logprobs is not None]
    if sum(map(len, sure)) > 1 and bool(torch.cat(sure).all()):
        raise DataError(
            "rollout_func gave each token the logprob 0, as if it had been certain, so the importance correction would weight the loss by almost "
            "nothing; give the log-probabilities that the tokens were drawn with, or None for logprobs where they are unknown."
        )


def _numbers(logprobs: Any, i: int) -> torch.Tensor:
    """[T] log-probabilities of completion number `i`. Raises DataError for anything but one number a token."""
    with suppress(TypeError, ValueError):
        numbers = torch.as_tensor(list(logprobs), dtype=torch.float32)
        if numbers.ndim == 1:
            return numbers
    raise DataError(
        f"rollout_func gave completion {i} logprobs that are not one number for each token; give a flat list."
    )


def _with_media(prompt: Prompt) -> Any:
    """The prompt as the user wrote it, its images and sounds in the messages."""
    if prompt.media is None or prompt.messages is None:
        return prompt.raw
    return with_items(prompt.messages, items_of(prompt, "which rollout_func cannot be handed"))
