"""Episodes out of an agent's calls: exact to the token, since nothing is rendered again.

A call continues an earlier one where its prompt begins with all tokens that the earlier one read and wrote. So calls form a
tree: retries and several answers are branches, and a prompt that goes on from nothing (another conversation, a shortened
history, a text that was tokenized otherwise) is a root. Each path from a root to a leaf is an episode.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch

from covey.data.rendering import content_text
from covey.environments.episodes import digest, state_before
from covey.serving.engine import Call
from covey.types import Completion, Message, Prompt, ToolCall


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One path of an agent's calls, as a completion of its first prompt."""

    session: str | None
    prompt: Prompt
    """The first call's."""
    completion: Completion
    """All that follows: `mask` is True for what the model wrote, and `logprobs` are as drawn (NaN: not reported), 0 elsewhere. `version` and `versions`
    are the weights of each turn, `finish` and `text` the last turn's."""
    call_ids: tuple[str, ...]
    """Ids of the calls, first to last."""
    states: tuple[str, ...] = ()
    """A key of each call's new messages: what the model saw since its turn before. Equal keys are the same state."""
    shown: tuple[Message, ...] = ()
    """Messages of the last call's prompt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """The episodes of some calls."""

    episodes: tuple[Episode, ...]
    num_breaks: int
    """Calls that show the model's earlier turns and yet go on from none of them: their agent changed the history, or its text
    became other tokens. They are episodes of their own, for what they show of earlier turns was not written there."""


@dataclass(eq=False)
class _Node:
    """One completion of a call."""

    call: Call
    completion: Completion
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    is_counted: bool = False
    """True if an episode has it with mask True already."""

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """All tokens up to here."""
        return (*self.call.group.prompt.token_ids, *self.completion.token_ids.tolist())

    @property
    def path(self) -> list[_Node]:
        """From the root to this."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]


def episodes_of(calls: Iterable[Call], *, last_first: bool = False) -> Recorded:
    """The episodes of calls, session by session, in the order of their first calls. Calls without a session are one session.

    A turn that several branches share is trained on once: its mask is True in the first of them alone, with `last_first` in the last.
    So are the answers before it.
    """
    sessions: dict[str | None, list[_Node]] = defaultdict(list)
    num_breaks = 0
    for call in sorted(calls, key=lambda item: (item.created, item.id)):
        nodes = sessions[call.session]
        parent = _parent(nodes, call.group.prompt)
        shown = call.group.prompt.messages or ()
        num_breaks += parent is None and bool(nodes) and any(message["role"] == "assistant" for message in shown)
        answers = [_Node(call, completion, parent) for completion in call.group.completions]
        if parent is not None:
            parent.children += answers
        nodes += answers
    leaves = [node for nodes in sessions.values() for node in nodes if not node.children]
    made = [_episode(leaf.path) for leaf in (reversed(leaves) if last_first else leaves)]
    return Recorded(episodes=tuple(reversed(made) if last_first else made), num_breaks=num_breaks)


def _parent(nodes: Sequence[_Node], prompt: Prompt) -> _Node | None:
    """The node with the most tokens, and images and sounds, that `prompt` begins with; of equals the latest, which a retry has replaced."""
    short = [node for node in nodes if len(node.ids) <= len(prompt.token_ids)]
    for node in reversed(sorted(short, key=lambda node: len(node.ids))):  # noqa: C413 - of equals the latest first
        media = node.call.group.prompt.media
        if prompt.token_ids[: len(node.ids)] == node.ids and (media is None or media.begins(prompt.media)):
            return node
    return None


def _episode(path: Sequence[_Node]) -> Episode:
    prompt = path[0].call.group.prompt
    ids, mask, logprobs, observed = list[int](), list[bool](), list[float](), list[bool]()
    spans: list[tuple[int, int]] = []
    for node in path:
        between = node.call.group.prompt.token_ids[len(prompt.token_ids) + len(ids) :]
        written = node.completion.token_ids.tolist()
        drawn = node.completion.logprobs
        ids += between
        spans += [(len(ids) + t, version) for t, version in ((0, node.completion.version), *node.completion.versions)]
        ids += written
        mask += [*([False] * len(between)), *([not node.is_counted] * len(written))]
        observed += [*([not node.is_counted] * len(between)), *([False] * len(written))]
        logprobs += [*([0.0] * len(between)), *([math.nan] * len(written) if drawn is None else drawn.tolist())]
        node.is_counted = True
    last = path[-1]
    seen = last.call.group.prompt.media
    shown = (last.call.group.prompt.messages or ())[len(prompt.messages or ()) :]
    completion = Completion(
        token_ids=torch.tensor(ids, dtype=torch.int64),
        text=last.completion.text,
        finish=last.completion.finish,
        logprobs=torch.tensor(logprobs),
        mask=torch.tensor(mask, dtype=torch.bool),
        observations=torch.tensor(observed, dtype=torch.bool),
        version=spans[0][1],
        versions=tuple(span for before, span in pairwise(spans) if span[1] != before[1]),
        media=None if seen is None or seen.begins(prompt.media) else seen,
        messages=(*shown, {"role": "assistant", "content": last.completion.text}),
    )
    return Episode(
        session=last.call.session,
        prompt=prompt,
        completion=completion,
        call_ids=tuple(node.call.id for node in path),
        states=tuple(state_of(node.call.group.prompt) for node in path),
        shown=last.call.group.prompt.messages or (),
    )


def state_of(prompt: Prompt) -> str:
    """State key: a hash of the messages since the assistant's last one; of all tokens where the prompt is no chat."""
    return digest(prompt.token_ids) if prompt.messages is None else state_before(prompt.messages)


def tool_calls_in(messages: Sequence[Message]) -> Iterator[ToolCall]:
    """Calls of tools in a conversation in OpenAI's form, with their answers; an answer `{"error": ...}` is an error."""
    answers = {
        message.get("tool_call_id"): content_text(message.get("content"))
        for message in messages
        if message.get("role") == "tool"
    }
    for message in messages:
        for call in message.get("tool_calls") or ():
            result = answers.get(call.get("id"))
            if result is None:
                continue
            function = call.get("function") or {}
            name, arguments = str(function.get("name")), function.get("arguments")
            status = "error" if _is_error(result) else "ok"
            yield ToolCall(name=name, arguments=arguments, result=result, status=status)  # type: ignore[arg-type]


def _is_error(result: str) -> bool:
    try:
        value = json.loads(result)
    except ValueError:
        return False
    return isinstance(value, Mapping) and "error" in value
