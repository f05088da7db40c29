"""Writers of a member's completions: a sampler of its own weights, or requests to an endpoint. Text of another tokenizer is encoded again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from covey.data import num_embeddings
from covey.data.prompts import encode_chat, template_of_prompt
from covey.data.rendering import THOUGHT_FIELDS, for_endpoint, say_once, spells_control
from covey.ensembles.member import Role
from covey.errors import ConfigError, RewardError
from covey.rewards.builtin.chat_endpoint import Endpoint, Reply, all_of
from covey.rollout import Sampler, SamplingParams, close_sampler
from covey.types import Completion, Finish, Group, Prompt

logger = logging.getLogger(__name__)

_STAND_IN = "covey-stand-in-for-an-answer"


@dataclass(frozen=True)
class Encoding:
    """Encoding of text as the policy reads it: its tokenizer, the ids that end a completion, and its chat template's options."""

    tokenizer: Any
    eos_ids: tuple[int, ...]
    num_embeddings: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(model: Any, tokenizer: Any, eos_ids: Sequence[int], template: Mapping[str, Any] | None = None) -> Encoding:
        return Encoding(tokenizer, tuple(eos_ids), num_embeddings(model), template or {})

    def __call__(self, text: str, finish: Finish, limit: int, has_marks: bool = False) -> list[int] | None:
        """Token ids of a text, the end-of-sequence token last where it ended with one. `has_marks`: it may hold control tokens.

        None where decoding them does not give the text back, or they are more than `limit`, or none.
        """
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        back = self.tokenizer.decode(ids, skip_special_tokens=not has_marks, clean_up_tokenization_spaces=False)
        if back != text or not ids:
            return None
        if finish == "stop":
            ids.append(self.eos_ids[0])
        is_encodable = self.num_embeddings is None or max(ids) < self.num_embeddings
        return ids if is_encodable and len(ids) <= limit else None

    def turn(self, prompt: Prompt, thoughts: str, text: str) -> str | None:
        """A turn behind the prompt as the chat template writes it, thoughts before its text. None where it does not."""
        thoughts, text = thoughts.strip(), text.strip()
        whole = self._behind(prompt, text, thoughts)
        if not thoughts:  # an answer such as `final` may be a word of the marks before it
            head, word, _ = (self._behind(prompt, _STAND_IN) or "").partition(_STAND_IN)
            return head + text if text and word and (whole or "").startswith(head + text) else None
        head, word, rest = (whole or "").partition(thoughts)
        if not word or thoughts in rest or text not in rest:
            return None
        return head + word + rest[: rest.rfind(text) + len(text) if text else 0]

    def _behind(self, prompt: Prompt, text: str, thoughts: str = "") -> str | None:
        """Text of the chat template behind the prompt, for a turn of the assistant. None where it does not begin with the prompt."""
        turn = {"role": "assistant", "content": text, **(dict.fromkeys(THOUGHT_FIELDS, thoughts) if thoughts else {})}
        options = {**self.template, **template_of_prompt(prompt, f"prompt {prompt.uid}")}
        try:
            whole = str(self.tokenizer.apply_chat_template([*(prompt.messages or ()), turn], tokenize=False, **options))
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return None
        before = self.tokenizer.decode(list(prompt.token_ids), clean_up_tokenization_spaces=False)
        return whole.removeprefix(before) if whole.startswith(before) else None


ReadTurn = Callable[[Any, Sequence[int], Sequence[int]], tuple[str, str] | None]
"""Thoughts and text of a turn, from a tokenizer, the turn's ids and the prompt's; None where no thoughts are told apart."""


def rewritten(
    name: str, encoding: Encoding, prompt: Prompt, thoughts: str, text: str, finish: Finish, limit: int
) -> tuple[list[int], str] | None:
    """A turn of member `name`, of another tokenizer, as the policy would write it: token ids and text.

    None where `encoding` has none, or the member spells out a control token of the policy.
    """
    tokenizer = encoding.tokenizer
    if spells_control(tokenizer, thoughts, text):
        return None
    whole = _turn(name, encoding, prompt, thoughts.strip(), text)
    ids = encoding(whole or text, finish, limit, has_marks=whole is not None)
    if ids is None or whole is None:
        return None if ids is None else (ids, text)
    shown = ids[:-1] if finish == "stop" else ids
    return ids, tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _turn(name: str, encoding: Encoding, prompt: Prompt, thoughts: str, text: str) -> str | None:
    """Thoughts in their marks, the answer in its channel. None for the text alone.

    Thoughts for which the policy has no form are left out, which is said once.
    """
    if thoughts and thoughts not in text:
        if (whole := encoding.turn(prompt, thoughts, text)) is not None:
            return whole
        say_once(
            f"Ensemble member {name} answers with thoughts apart, for which the policy's prompts and chat template have no "
            "place; its completions are the answers without them."
        )
    whole = encoding.turn(prompt, "", text)
    return whole if whole is not None and spells_control(encoding.tokenizer, whole) else None


@dataclass(eq=False)
class LocalWriter:
    """A member whose weights are in this process."""

    name: str
    role: Role
    samples: int
    sampler: Sampler
    tokenizer: Any
    encoding: Encoding | None = None
    """Encoding of its text as the policy's tokens. None: completions are taken over as they are."""
    renders: bool = False
    """True if it reads prompts in tokens of its own. False: the policy's tokens are its own."""
    read_turn: ReadTurn | None = None
    """Reader of its turns in a chat. None: their text is taken over as it is."""

    def write(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Group]:
        """A group of `samples` completions of each prompt, in the policy's tokens, without those that are not the same in them.

        Its prompt is what an environment or an agent showed to the member. Lost episodes are left out too.
        """
        shown = [self._rendered(prompt) if self.renders else prompt for prompt in prompts]
        place = {prompt.uid: i for i, prompt in enumerate(shown)}
        out = [Group(prompt=prompt, completions=()) for prompt in prompts]
        for group in self.sampler.sample(shown, self.samples, params):
            i = place[group.prompt.uid]
            taken = [
                self._taken_over(completion, prompts[i], shown[i], params)
                for completion in group.completions
                if completion.num_tokens
            ]
            out[i] = Group(
                prompt=prompts[i] if self.renders else group.prompt,
                completions=tuple(completion for completion in taken if completion is not None),
                events=tuple(
                    replace(event, said=f"Ensemble member {self.name}: {event.said}") for event in group.events
                ),
            )
        return out

    def close(self) -> None:
        """Close what its sampler has open, such as an agent's endpoint."""
        close_sampler(self.sampler)

    def _rendered(self, prompt: Prompt) -> Prompt:
        """The prompt in the member's own tokens and chat template."""
        if prompt.messages is not None:
            return replace(prompt, token_ids=encode_chat(prompt.messages, f"prompt {prompt.uid}", self.tokenizer, {}))
        if prompt.text is None:
            raise ConfigError(
                f"prompt {prompt.uid} is token ids, which ensemble member {self.name} cannot read; give text or messages."
            )
        return replace(prompt, token_ids=tuple(self.tokenizer(prompt.text)["input_ids"]))

    def _taken_over(
        self, completion: Completion, prompt: Prompt, shown: Prompt, params: SamplingParams
    ) -> Completion | None:
        completion = for_each_path(completion, lambda path: replace(path, source=self.name))
        if self.encoding is None:
            return completion
        turn = None
        if self.read_turn is not None and prompt.messages is not None:
            turn = self.read_turn(self.tokenizer, completion.token_ids.tolist(), shown.token_ids)
        thoughts, text = turn or ("", completion.text)
        written = rewritten(self.name, self.encoding, prompt, thoughts, text, completion.finish, params.max_tokens)
        if written is None:
            return None
        ids, text = written
        return replace(completion, token_ids=torch.tensor(ids), text=text, logprobs=None)


@dataclass(eq=False)
class EndpointWriter:
    """A member behind an OpenAI-compatible address: text in, text out. A request that fails leaves its completion out."""

    name: str
    role: Role
    samples: int
    endpoint: Endpoint
    encoding: Encoding | None = None
    """None: its completions have text and no tokens."""
    check_stop: Callable[[], None] = field(default=lambda: None)
    """Called while requests are pending; an exception ends the waiting."""
    is_away: bool = field(default=False, init=False)
    """True if no request of the last call was answered."""

    def write(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Group]:
        """As `LocalWriter.write`. Raises ConfigError where the endpoint refuses for good: a wrong key, model or address."""
        work = [partial(self._ask, prompt, params, i) for prompt in prompts for i in range(self.samples)]
        try:
            answers = all_of(work, self.check_stop)
        except RewardError as error:
            raise ConfigError(f"Ensemble member {self.name}: {error}") from error
        if answers:
            self._warn(sum(answer is None for answer in answers), len(answers))
        replies = iter(answers)
        made = [[self._completion(prompt, next(replies), params) for _ in range(self.samples)] for prompt in prompts]
        return [
            Group(prompt=prompt, completions=tuple(completion for completion in row if completion is not None))
            for prompt, row in zip(prompts, made, strict=True)
        ]

    def _warn(self, lost: int, count: int) -> None:
        was_away, self.is_away = self.is_away, lost == count
        if lost and not was_away:
            logger.warning(
                "Ensemble member %s at %s did not answer %d of %d requests; the run goes on without these completions "
                "(ensemble/%s/lost says how many), and asks it again at each step.",
                *(self.name, self.endpoint.url, lost, count, self.name),
            )

    def _ask(self, prompt: Prompt, params: SamplingParams, sample: int) -> Reply | None:
        raw = prompt.raw
        messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else list(map(for_endpoint, raw))
        seed = {} if params.seed is None else {"seed": params.seed + sample}
        top_p = {} if params.top_p == 1 else {"top_p": params.top_p}
        extra = {**self.endpoint.extra, **seed, **top_p}
        endpoint = replace(self.endpoint, temperature=params.temperature, max_tokens=params.max_tokens, extra=extra)
        seconds = endpoint.request_seconds * (endpoint.retries + 1)
        try:
            return endpoint.ask(messages, time.monotonic() + seconds)
        except (TimeoutError, ConnectionError):
            return None

    def _completion(self, prompt: Prompt, reply: Reply | None, params: SamplingParams) -> Completion | None:
        if reply is None:
            return None
        finish: Finish = "length" if reply.finish == "length" else "stop"
        text, ids = reply.text, list[int]()
        if self.encoding is not None:
            limit = params.max_tokens
            written = rewritten(self.name, self.encoding, prompt, reply.thoughts, text, finish, limit)
            if written is None:
                return None
            ids, text = written
        return Completion(token_ids=torch.tensor(ids, dtype=torch.int64), text=text, finish=finish, source=self.name)


def for_each_path(completion: Completion, change: Callable[[Completion], Completion]) -> Completion:
    """The completion and its branches, which are paths of one agent's episode, each changed."""
    notes = completion.episode
    if notes is not None and notes.branches:
        notes = replace(notes, branches=tuple(change(branch) for branch in notes.branches))
    return replace(change(completion), episode=notes)


Writer = LocalWriter | EndpointWriter
"""One member, loaded."""
