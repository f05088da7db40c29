"""Episodes: completions of several turns, in which the model calls tools and reads their answers.

The sampler calls `Episodes` whenever a completion ends with an end-of-text token. Calls in the model's turn are run, all completions' side by
side, and their answers go back as token ids that the completion goes on from: the KV cache stays, and the tokens that the
model wrote are never rendered again. Tokens of answers have `mask` False and no gradient.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.environments.call_forms import WrittenCall, typed_call
from covey.environments.calls import Request, ToolRunner, failed
from covey.environments.contents import shown_parts
from covey.environments.factory import Encode, EnvironmentPool, Reset
from covey.environments.template import Template
from covey.environments.tools import Tool
from covey.errors import DataError
from covey.rollout import Sampler, SamplingParams
from covey.rollout.environments import Answer, Turn
from covey.rollout.prompts import PromptLike
from covey.types import Completion, EpisodeNotes, Finish, Group, Message, Prompt, ToolCall


def states_of(messages: Sequence[Message], first: Any = ()) -> tuple[str, ...]:
    """[K] state keys: for each of the assistant's messages, a hash of the messages since the one before; `first` precedes all."""
    keys, seen = [], [first]
    for message in messages:
        if message["role"] != "assistant":
            seen.append(_role_and_content(message))
            continue
        keys.append(digest(seen))
        seen = []
    return tuple(keys)


def state_before(messages: Sequence[Message]) -> str:
    """State key: a hash of the messages after the assistant's last one."""
    is_answer = [message["role"] == "assistant" for message in messages]
    new = messages[len(is_answer) - is_answer[::-1].index(True) :] if any(is_answer) else messages
    return digest([_role_and_content(message) for message in new])


def digest(value: Any) -> str:
    """A short key of a value that JSON can write."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _role_and_content(message: Message) -> list[Any]:
    return [message.get("role"), message.get("content")]


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits of one episode."""

    turns: int | None = None
    """Times that tools are called; the completion ends at the next call with finish `turns`. None: no limit."""
    seconds: float | None = None
    """Time since the episode began; past it the completion ends at the next call with finish `seconds`. None: no limit."""


@dataclass(eq=False)
class _Episode:
    """One completion on its way."""

    tools: Mapping[str, Tool]
    reset: Reset | None = None
    started: float = field(default_factory=time.monotonic)
    messages: list[Message] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    turns: int = 0
    read: tuple[int, ...] = ()
    """Tokens of the completion that `messages` hold already."""
    finish: Finish | None = None
    """Set where a limit of the episode ended it."""


class Episodes:
    """The running episodes of a sampler; called with the turns that have just ended, it gives one reply each (token ids, or None)."""

    def __init__(self, template: Template, tools: Sequence[Tool], limits: EpisodeLimits | None = None) -> None:
        self.template, self.tools = template, {tool.name: tool for tool in tools}
        self.limits = limits or EpisodeLimits()
        self.runner = ToolRunner(template.tokenizer, template.processor, template.shows)
        self._running: dict[tuple[str, int], _Episode] = {}

    def begin(self, prompt: Prompt, resets: Sequence[Reset | None]) -> None:
        """Start the episodes of a group, one for each of `resets` (None: no environment).

        Raises DataError for a prompt that is text, since tools are shown by a chat template.
        """
        if prompt.messages is None:
            raise DataError(
                f"prompt {prompt.uid} is plain text, but tools need chat prompts; write it as "
                '[{"role": "user", "content": "..."}].'
            )
        for i, reset in enumerate(resets):
            tools = self.tools if reset is None else self.tools | {tool.name: tool for tool in reset.tools}
            self._running[prompt.uid, i] = _Episode(tools, reset)

    def __call__(self, turns: Sequence[Turn]) -> list[Answer | None]:
        """Token ids and media to append to each completion before it continues, or None where it is over."""
        episodes = [self._of(turn) for turn in turns]
        written = [
            self._note(episode, turn.prompt, turn.token_ids) for episode, turn in zip(episodes, turns, strict=True)
        ]
        requests = [
            [Request(call.name, call.arguments, episode.tools, call.problem) for call in calls]
            for episode, calls in zip(episodes, written, strict=True)
        ]
        results = iter(self.runner.run([request for many in requests for request in many]))
        replies = []
        for episode, calls in zip(episodes, written, strict=True):
            done = [next(results) for _ in calls]
            replies.append(self._answer(episode, done, calls) if done else None)
        return replies

    def end(self, group: Group) -> Group:
        """The finished group, each completion with its messages, tool calls and environment."""
        return replace(
            group,
            completions=tuple(
                self._ended(group.prompt, i, completion) for i, completion in enumerate(group.completions)
            ),
        )

    def forget(self, uids: Sequence[str]) -> None:
        """Drop episodes that will not be finished."""
        gone = set(uids)
        self._running = {key: episode for key, episode in self._running.items() if key[0] not in gone}

    def _of(self, turn: Turn) -> _Episode:
        """The turn's episode; begun again where the completion is written once more: memory ran out, or another sampler goes on for it."""
        key = (turn.prompt.uid, turn.sample)
        episode = self._running[key]
        is_next = len(turn.token_ids) > len(episode.read) and turn.token_ids[: len(episode.read)] == episode.read
        if episode.read and not is_next:
            if episode.reset is not None:
                episode.reset.again()
            episode = self._running[key] = _Episode(episode.tools, episode.reset)
        return episode

    def _ended(self, prompt: Prompt, sample: int, completion: Completion) -> Completion:
        episode = self._running.pop((prompt.uid, sample))
        if len(episode.read) < completion.num_tokens:  # a last turn that was cut at a limit
            self._note(episode, prompt, completion.token_ids.tolist(), is_over=True)
        columns = {} if episode.reset is None else {"environments": episode.reset.instance}
        return replace(
            completion,
            finish=episode.finish or completion.finish,
            messages=tuple(episode.messages),
            tool_calls=tuple(episode.calls),
            episode=_notes(prompt, episode),
            columns={**completion.columns, **columns},
        )

    def _note(
        self, episode: _Episode, prompt: Prompt, token_ids: Sequence[int], is_over: bool = False
    ) -> list[WrittenCall]:
        """Add the model's turn to the messages; its calls, where they are to be run."""
        before, read = [*prompt.token_ids, *episode.read], len(episode.read)
        text, calls, thoughts = self.template.turn_in(token_ids[read:], before)
        episode.read = tuple(token_ids)
        message: dict[str, Any] = {"role": "assistant", "content": text, **thoughts}
        if calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        episode.messages.append(message)
        if is_over or not calls:
            return []
        episode.finish = self._limit(episode)
        if episode.finish is not None:
            return []
        episode.turns += 1
        return [typed_call(call, tool.parameters) if (tool := episode.tools.get(call.name)) else call for call in calls]

    def _limit(self, episode: _Episode) -> Finish | None:
        if self.limits.turns is not None and episode.turns >= self.limits.turns:
            return "turns"
        is_late = self.limits.seconds is not None and time.monotonic() - episode.started > self.limits.seconds
        return "seconds" if is_late else None

    def _answer(self, episode: _Episode, done: Sequence[ToolCall], calls: Sequence[WrittenCall]) -> Answer | None:
        """The answers and the turn's beginning; None where the environment says that the episode is over."""
        is_over = episode.reset is not None and getattr(episode.reset.instance, "is_over", False) is True
        shown, answer = (done, None) if is_over else self._rendered(done, calls, len(episode.calls))
        episode.calls += shown
        episode.messages += [_as_answer(call, shown_parts(call.parts)) for call in shown]
        episode.read += () if answer is None else tuple(answer.token_ids)
        return answer

    def _rendered(
        self, done: Sequence[ToolCall], calls: Sequence[WrittenCall], num_before: int
    ) -> tuple[Sequence[ToolCall], Answer]:
        """These calls through the chat template; those whose media the processor refuses, alone or with the others, are errors."""
        answer = lambda shown: self.template.answer([_as_answer(call, call.parts) for call in shown], calls, num_before)
        try:
            return done, answer(done)
        except DataError:
            if not any(call.parts for call in done):
                raise
        shown = [self._readable(call, written) for call, written in zip(done, calls, strict=True)]
        try:
            return shown, answer(shown)
        except DataError as error:
            shown = [failed(call, str(error)) if call.parts else call for call in shown]
        return shown, answer(shown)

    def _readable(self, call: ToolCall, written: WrittenCall) -> ToolCall:
        try:
            self.template.answer([_as_answer(call, call.parts)], [written], 0)
        except DataError as error:
            return failed(call, str(error))
        return call


def _notes(prompt: Prompt, episode: _Episode) -> EpisodeNotes:
    """The states that turns began in, and what the environment says of them: `turn_rewards`, and the `role` that the model played."""
    rewards = () if episode.reset is None else getattr(episode.reset.instance, "turn_rewards", ())
    first: list[Any] = list(map(_role_and_content, prompt.messages or ()))
    first += [] if prompt.media is None else prompt.media.names
    role = None if episode.reset is None else getattr(episode.reset.instance, "role", None)
    return EpisodeNotes(
        states=states_of(episode.messages, first),
        rewards=tuple(float(reward) for reward in rewards),
        role=None if role is None else str(role),
    )


def _as_answer(call: ToolCall, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of a call's answer: its text, or its parts where it has media."""
    return {"role": "tool", "name": call.name, "content": list(parts) if parts else call.result}


class EpisodeSampler:
    """A sampler of episodes: resets the environments, lets `sampler` generate, and attaches the episodes' records to the completions.

    `make` builds the sampler from the hook that it asks when a completion ends by itself. `encode` renders a prompt again
    with what its environment's `reset` returned.
    """

    def __init__(
        self,
        make: Callable[[Episodes], Sampler],
        episodes: Episodes,
        environments: EnvironmentPool | None = None,
        encode: Encode | None = None,
        is_ahead: bool = False,
    ) -> None:
        """`is_ahead`: groups are scored while others are written, and their environments released then: `EnvironmentPool.release_of`."""
        self.episodes, self.environments, self.encode, self.is_ahead = episodes, environments, encode, is_ahead
        self.sampler = make(episodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def load(self, policy: Any, version: int) -> None:
        """From now on sample with these weights; completions carry `version`."""
        self.sampler.load(policy, version)

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` episodes for each prompt, as they finish. Raises DataError for a prompt that is no chat."""
        used: dict[str, list[Any]] = {}
        ended = []
        try:
            for group in self.sampler.sample([self._begin(prompt, n, used) for prompt in prompts], n, params):
                ended.append(group.prompt.uid)
                yield self.episodes.end(group)
        finally:
            unfinished = used.keys() - set(ended)
            self.episodes.forget(list(unfinished))
            if self.environments is not None:
                for uid in unfinished if self.is_ahead else used:
                    self.environments.release(used[uid])

    def _begin(self, prompt: PromptLike, n: int, used: dict[str, list[Any]]) -> Prompt:
        """The prompt that is shown, its episodes begun; their environments are added to `used`."""
        if not isinstance(prompt, Prompt):
            raise DataError("an EpisodeSampler takes Prompts; encode text or messages with covey.data first.")
        resets: Sequence[Reset | None] = [None] * n
        if self.environments is not None and self.encode is not None:
            prompt, resets = self.environments.reset(prompt, n, self.encode)
        used[prompt.uid] = [reset.instance for reset in resets if reset is not None]
        self.episodes.begin(prompt, resets)
        return prompt
