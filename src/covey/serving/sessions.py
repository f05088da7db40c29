"""Sessions of a run's own endpoint: one for each episode of an agent, with its calls, its limits and its random draws."""

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from covey.data.thoughts import message_thoughts, without_thoughts
from covey.rollout import SamplingParams
from covey.serving.asking import APIRequest
from covey.serving.engine import Call, PromptRequest
from covey.serving.errors import APIError
from covey.serving.turns import TurnReader
from covey.types import Completion, Finish, Media, Message, Prompt


@dataclass(frozen=True, eq=False)
class Answered:
    """An answered call, as what follows it needs it."""

    prompt: Prompt
    """As it was read."""
    rendered: tuple[int, ...]
    """Its messages through the chat template."""
    reader: TurnReader
    """Of its answers."""
    completions: tuple[Completion, ...]


def continued(
    prompt: Prompt, answered: Sequence[Answered], eos_ids: Sequence[int], reader: TurnReader | None = None
) -> Prompt:
    """The prompt with the drawn tokens of the longest earlier answer that it continues; unchanged if it continues none.

    A client sends the whole conversation as text. Where its messages begin with those of an earlier call and the answer that this
    call got, the prompt's ids are that call's prompt, its answer as drawn, and what the chat template puts behind the model's turn.
    The client may leave out the thoughts of answers, and so may the template. `reader`: of the prompt's own request.
    """
    if prompt.messages is None or reader is None:
        return prompt
    for call in sorted(answered, key=lambda candidate: -len(candidate.prompt.messages or ())):
        for done in reversed(call.completions):
            ids = _try_continue(prompt, call, done, frozenset(eos_ids), reader)
            if ids is not None:
                media = None if prompt.media is None else prompt.media.over(prompt.token_ids, ids)
                return replace(prompt, token_ids=ids, media=media)
    return prompt


def _try_continue(
    prompt: Prompt, call: Answered, done: Completion, eos_ids: frozenset[int], reader: TurnReader
) -> tuple[int, ...] | None:
    before, now = call.prompt.messages, prompt.messages
    if before is None or now is None or len(now) <= len(before) or not all(map(_are_same, before, now)):
        return None
    if not _is_answer(now[len(before)], call, done):
        return None
    fresh, start = list(prompt.token_ids), len(call.rendered)
    if tuple(fresh[:start]) != call.rendered:  # thoughts are left out, by the client or by the template
        short = reader.behind(now[len(before) :]) if reader.options == call.reader.options else None
        if short is None:
            return None
        fresh, start = short
    end = next((i for i in range(start, len(fresh)) if fresh[i] in eos_ids), None)
    if end is None:
        return None
    written = tuple(done.token_ids.tolist())
    has_ended = bool(written) and written[-1] in eos_ids
    behind = fresh[end + 1 :] if has_ended else fresh[end:]
    return (*call.prompt.token_ids, *written, *behind)


def _are_same(before: Message, now: Message) -> bool:
    """True if two messages differ in nothing but thoughts that one of them leaves out."""
    first, second = without_thoughts([before, now])
    thoughts = {message_thoughts(before), message_thoughts(now)} - {""}
    return first == second and len(thoughts) < 2


def _is_answer(message: Message, call: Answered, done: Completion) -> bool:
    """True if an assistant's message is what the client was answered, with its thoughts or without."""
    if message.get("role") != "assistant":
        return False
    turn = call.reader.turn(done.token_ids.tolist(), call.prompt.token_ids)
    functions = [tool_call.get("function") or {} for tool_call in message.get("tool_calls") or ()]
    if len(functions) != len(turn.calls) or message_thoughts(message) not in ("", turn.thoughts):
        return False
    if (message.get("content") or "") not in (turn.content, *(() if turn.calls else (done.text,))):
        return False
    calls = [(function.get("name"), function.get("arguments")) for function in functions]
    return calls == [(written.name, written.arguments) for written in turn.calls]


def _forgotten(messages: Sequence[Mapping[str, Any]], add_prompt: bool) -> list[int]:
    raise RuntimeError("the messages of a request that is answered are not rendered again")


def share_media(calls: list[Call], media: Media) -> None:
    """Make the media of earlier calls views of `media`, where these begin with them.

    A conversation sends all of its images and sounds each time; so they are in memory once.
    """
    equal = dict[Any, torch.Tensor]()  # by place in memory: the latest first, of which the earlier are views already
    previews = {preview: preview for preview in media.previews}
    for i, call in reversed([*enumerate(calls)]):
        prompt = call.group.prompt
        if prompt.media is None or not prompt.media.begins(media):
            continue
        tensors = dict(prompt.media.tensors)
        for name, tensor in tensors.items():
            whole, place = media.tensors.get(name, tensor), (name, tensor.data_ptr(), tensor.stride())
            view = whole[tuple(map(slice, tensor.shape))] if whole.ndim == tensor.ndim else tensor
            is_checked = place in equal and all(n <= m for n, m in zip(view.shape, equal[place].shape, strict=True))
            if is_checked or (view.dtype == tensor.dtype and torch.equal(view, tensor)):
                equal.setdefault(place, view)
                tensors[name] = view
        shown = tuple(previews.get(preview, preview) for preview in prompt.media.previews)
        shared = replace(prompt.media, tensors=tensors, previews=shown)
        calls[i] = replace(call, group=replace(call.group, prompt=replace(prompt, media=shared)))


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """Calls of one episode, while it runs."""

    id: str
    key: int
    """Random draws of its answers hang on this, on the prompt, and on how often that was asked before."""
    calls: list[Call] = field(default_factory=list)
    finish: Finish | None = None
    """The limit that a call was refused for."""
    is_open: bool = True
    num_draws: Counter[tuple[str, ...]] = field(default_factory=Counter)
    rendered: dict[tuple[int, ...], tuple[tuple[int, ...], TurnReader]] = field(default_factory=dict)
    """By the ids of each prompt of a chat: its messages through the chat template, and what reads its answers."""

    def seed(self, prompt: Prompt) -> int:
        """Of the next answer to this prompt."""
        shown = () if prompt.media is None else [digest for kind in prompt.media.digests.values() for digest in kind]
        identity = (*map(str, prompt.token_ids), *shown)
        again = self.num_draws[identity]
        self.num_draws[identity] += 1
        words = f"{self.key}\0{again}\0{' '.join(identity)}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little")

    def continued(self, prompt: Prompt, reader: TurnReader | None, eos_ids: Sequence[int]) -> Prompt:
        """The prompt with the tokens of earlier answers as they were drawn."""
        chats = [call.group for call in self.calls if call.group.prompt.token_ids in self.rendered]
        answered = [
            Answered(group.prompt, *self.rendered[group.prompt.token_ids], group.completions) for group in chats
        ]
        continuation = continued(prompt, answered, eos_ids, reader)
        if reader is not None:
            lasting = replace(reader, render=_forgotten)  # that of the request holds its images
            self.rendered[continuation.token_ids] = (prompt.token_ids, lasting)
        return continuation

    def read(self, prompt: Prompt) -> int:
        """Tokens after the first prompt of this conversation, those that the model wrote among them."""
        ids = prompt.token_ids
        first = [call.group.prompt.token_ids for call in self.calls]
        return len(ids) - min((len(prefix) for prefix in first if ids[: len(prefix)] == prefix), default=len(ids))


class Sessions:
    """The open sessions of an endpoint. `admit` and `record` are its hooks; anything else may be called from any thread."""

    def __init__(self, max_tokens: int, max_turns: int | None, eos_ids: Sequence[int]) -> None:
        """At most `max_tokens` of an episode after its first prompt, and `max_turns` calls (None: no limit)."""
        self.max_tokens, self.max_turns, self.eos_ids = max_tokens, max_turns, tuple(eos_ids)
        self.params = SamplingParams()
        self._open: dict[str, Session] = {}
        self._lock = threading.Lock()
        self._has_warned = False

    def open(self, session: Session) -> None:
        with self._lock:
            self._open[session.id] = session

    def close(self, session: Session) -> None:
        """Refuse further calls; those that run are not recorded any more."""
        with self._lock:
            session.is_open = False
            self._open.pop(session.id, None)

    def admit(self, api_request: APIRequest, name: str | None) -> APIRequest:
        """The request as the run draws it. Raises APIError for one outside of an episode, or past a limit of its own."""
        with self._lock:
            session = self._open.get(name or "")
            if session is None:
                sentence = f"No episode {name!r} runs: it is over, or this is neither the base_url nor the api_key that the agent was given."
                raise APIError(410, sentence, code="no_episode")
            return replace(
                api_request,
                prompt_requests=tuple(
                    self._drawn(session, prompt_request, api_request.reader)
                    for prompt_request in api_request.prompt_requests
                ),
            )

    def _drawn(self, session: Session, prompt_request: PromptRequest, reader: TurnReader | None) -> PromptRequest:
        if self.max_turns is not None and sum(session.num_draws.values()) >= self.max_turns:
            session.finish = "turns"
            raise APIError(400, f"The episode has had its {self.max_turns} calls.", code="too_many_turns")
        prompt_request = replace(prompt_request, prompt=session.continued(prompt_request.prompt, reader, self.eos_ids))
        room = self.max_tokens - session.read(prompt_request.prompt)
        if room < 1:
            session.finish = "length"
            sentence = f"The episode has had its {self.max_tokens} tokens (max_completion_length)."
            raise APIError(400, sentence, code="context_length_exceeded")
        self._warn(prompt_request)
        params = replace(self.params, stop=prompt_request.params.stop, max_tokens=1, seed=None)
        return replace(
            prompt_request,
            params=params,
            seed=session.seed(prompt_request.prompt),
            limit=min(prompt_request.limit, room),
        )

    def _warn(self, prompt_request: PromptRequest) -> None:
        plain = replace(prompt_request.params, stop=(), max_tokens=1, seed=None)
        run_params = replace(self.params, stop=(), max_tokens=1, seed=None)
        if self._has_warned or plain in (run_params, SamplingParams(max_tokens=1)):
            return
        self._has_warned = True
        logger.warning(
            "An agent asks for sampling options of its own (temperature, top_p, ...); a run draws with the run's, on which its "
            "log-probabilities are taken."
        )

    def record(self, call: Call) -> None:
        """Keep an answered call with its session. On the engine's thread."""
        with self._lock:
            session = self._open.get(call.session or "")
            if session is not None:
                if call.group.prompt.media is not None:
                    share_media(session.calls, call.group.prompt.media)
                session.calls.append(call)
