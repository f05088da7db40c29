"""Agents of a run: unmodified loops over the run's own endpoint, side by side, whose calls become the completions of a group."""

import queue
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from covey.environments import Agent, AgentResult
from covey.errors import CoveyError, DataError
from covey.models.modalities import banned_ids
from covey.rollout import NativeSampler, SamplingParams, TokenSampler
from covey.rollout.joining import behind, shared_part
from covey.rollout.prompts import PromptLike, occurrences
from covey.rollout.sampler import sampler_metrics
from covey.rollout.sampling import sequence_key
from covey.serving.content import openai_messages
from covey.serving.endpoint import Endpoint
from covey.serving.engine import Call
from covey.serving.episodes import Episode, Recorded, episodes_of, tool_calls_in
from covey.serving.limits import Limits
from covey.serving.sessions import Session, Sessions
from covey.serving.traces import Trace, expect_recorded
from covey.types import Completion, EpisodeNotes, Event, Group, Max, Mean, Message, Metric, Prompt, merge_metrics


class Watch:
    """Stops of a rollout whose calls are answered on the engine's thread: the run's own are looked for by the thread that waits alone."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.check_stop, self.is_left = sampler, sampler.check_stop, False
        if not isinstance(sampler, NativeSampler):
            sampler.check_stop = self._expect_listeners

    def leave(self) -> None:
        """End the answers that nobody waits for."""
        self.is_left = True

    def end(self) -> None:
        if not isinstance(self.sampler, NativeSampler):
            self.sampler.check_stop = self.check_stop

    def _expect_listeners(self) -> None:
        if self.is_left:
            raise CoveyError("the rollout of this agent is over.")


MODEL = "policy"
_POLL_SECONDS = 0.1
_MANY = 1_000_000
_MOST_BYTES = 1 << 30
"""Of a request: a conversation comes with all of its images each time."""


@dataclass(eq=False)
class _Run:
    """One episode on its way."""

    place: tuple[int, int]
    """(prompt, completion)"""
    prompt: Prompt
    session: Session
    shown: str | list[Message]
    """The prompt as the agent is handed it."""
    started: float = 0.0
    created: float = 0.0
    seconds: float = 0.0
    result: AgentResult | None = None
    lost: str = ""
    """Why there is nothing to train on; empty: there is."""
    traceback: str = ""
    recorded: Mapping[str | None, Recorded] = field(default_factory=dict)
    """Episodes by the role that the model played in them; None: the agent has no roles."""

    @property
    def episodes(self) -> list[Episode]:
        """Of all roles."""
        return [episode for recorded in self.recorded.values() for episode in recorded.episodes]


class AgentSampler:
    """A sampler whose completions `agent` writes, by calls of an endpoint that `sampler` answers.

    Each episode has a session of its own. An agent that raises, or is not done after `timeout_seconds`, loses its episode: the
    group goes on without it, with an event. `max_turns`: most calls of an episode. At most `concurrency` agents run at once, each
    in a thread. `record` gets the trace of each episode. `may_fail`: a rollout may lose all of its episodes. `processor`: that of
    a model that reads images or sounds, which agents then send in their messages. Another sampler than the native one answers calls that wait as one batch.
    """

    def __init__(
        self,
        sampler: TokenSampler,
        agent: Agent,
        *,
        max_tokens: int,
        max_turns: int | None = None,
        timeout_seconds: float = 600.0,
        concurrency: int = 64,
        record: Callable[[int, Sequence[Trace]], None] = lambda version, traces: None,
        may_fail: bool = False,
        processor: Any = None,
    ) -> None:
        self.sampler, self.processor = sampler, processor
        self.agent, self.record, self.may_fail = agent, record, may_fail
        self.timeout_seconds, self.concurrency = timeout_seconds, concurrency
        self.sessions = Sessions(max_tokens, max_turns, self.sampler.eos_ids)
        self.endpoint: Endpoint | None = None
        self._ended: queue.SimpleQueue[_Run] = queue.SimpleQueue()
        self._metrics: list[dict[str, Metric]] = []
        self._count = 0

    @property
    def check_stop(self) -> Callable[[], None]:
        """Called while agents run; what it raises ends the sampling."""
        return self.sampler.check_stop

    @property
    def version(self) -> int:
        return self.sampler.version

    def load(self, policy: Any, version: int) -> None:
        """From now on answer with these weights; completions carry `version`."""
        if self.endpoint is None:
            self.sampler.load(policy, version)
        else:
            self.endpoint.load(policy, version)

    def close(self) -> None:
        """Stop listening."""
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None

    def take_metrics(self) -> dict[str, Metric]:
        """Of the episodes since the last call."""
        taken, self._metrics = self._metrics, []
        return {**sampler_metrics(self.sampler), **merge_metrics(taken)}

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of at most `n` episodes for each prompt, as they are over. Raises DataError where every agent failed."""
        encoded = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        if len(encoded) < len(prompts):
            raise DataError("an AgentSampler takes Prompts; encode text or messages with covey.data first.")
        if hasattr(self.sampler, "go_on"):  # of all processes together: the weights, which each call finds there
            list(self.sampler.sample([], n, params))
        self._open()
        self.sessions.params = params
        self._count += 1
        seed = params.seed or 0
        runs = []
        for p, (prompt, occurrence) in enumerate(zip(encoded, occurrences(encoded), strict=True)):
            shown = prompt.raw if prompt.messages is None and prompt.media is None else openai_messages(prompt)
            for g in range(n):
                key = sequence_key(seed, prompt.uid, occurrence, g)
                session = Session(f"{self._count}-{p}-{g}-{key & 0xFFFFFFFF:08x}", key)
                runs.append(_Run((p, g), prompt, session, shown))
        return self._groups(runs, len(encoded))

    def _open(self) -> None:
        if self.endpoint is None:
            sizes = dict.fromkeys(("max_waiting", "max_connections", "max_choices"), _MANY)
            limits = Limits(**sizes, drain_seconds=1.0, max_body_bytes=_MOST_BYTES)
            hooks: dict[str, Any] = {"on_call": self.sessions.record, "admit": self.sessions.admit}
            hooks["processor"] = self.processor
            if not isinstance(self.sampler, NativeSampler):
                hooks["logprobs_mode"] = "processed_logprobs"  # the only ones that it reports
            self.endpoint = Endpoint(cast(Any, self.sampler), name=MODEL, limits=limits, **hooks)
            self.endpoint.open()

    # -- episodes side by side --------------------------------------------------------------------------------------

    def _groups(self, runs: list[_Run], num_prompts: int) -> Iterator[Group]:
        waiting, running = deque(runs), dict[int, _Run]()
        left = Counter(run.place[0] for run in runs)
        watch = Watch(self.sampler)
        try:
            while waiting or running:
                while waiting and len(running) < self.concurrency:
                    run = waiting.popleft()
                    running[id(run)] = run
                    self._start(run)
                watch.check_stop()
                for run in self._over(running):
                    del running[id(run)]
                    self._settle(run)
                    p = run.place[0]
                    left[p] -= 1
                    if not left[p]:
                        yield self._group([run for run in runs if run.place[0] == p])
        finally:
            watch.leave()
            for run in running.values():
                self.sessions.close(run.session)
            if self.endpoint is not None:  # answers are written, or left, before the weights change
                self.endpoint.engine.when_idle(lambda: None).result()
            watch.end()
        self._finish(runs)

    def _start(self, run: _Run) -> None:
        assert self.endpoint is not None  # opened before
        self.sessions.open(run.session)
        run.started, run.created = time.monotonic(), time.time()
        base = self.endpoint.url.removesuffix("/v1")
        offered = {
            "row": {**run.prompt.columns, "prompt": run.shown},
            "base_url": f"{base}/sessions/{run.session.id}/v1",
            "model": MODEL,
            "api_key": run.session.id,
            "seed": run.session.key & 0x7FFFFFFF,
        }
        thread = threading.Thread(
            target=self._act, args=(run, offered), name=f"covey-agent-{run.session.id}", daemon=True
        )
        thread.start()

    def _act(self, run: _Run, offered: Mapping[str, Any]) -> None:
        """One episode, in its thread; whatever it raises ends this episode alone."""
        result, lost, trace = None, "", ""
        try:
            result = self.agent(**offered)
        except BaseException as error:  # noqa: BLE001 - told in an event; an agent that exits must not end the run
            lost, trace = f"{type(error).__name__}: {error}"[:500], traceback.format_exc()[-4000:]
        if run.session.is_open:
            run.result, run.lost, run.traceback = result, lost, trace
            self._ended.put(run)

    def _over(self, running: Mapping[int, _Run]) -> list[_Run]:
        """Episodes that have just ended, by themselves or at their deadline."""
        ended = []
        try:
            ended.append(self._ended.get(timeout=_POLL_SECONDS))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            ended = [run for run in ended if id(run) in running]
        now = time.monotonic()
        for run in running.values():
            if run not in ended and now - run.started > self.timeout_seconds:
                self.sessions.close(run.session)
                run.result, run.lost = None, f"it was not done after {self.timeout_seconds:g} seconds"
                ended.append(run)
        return ended

    def _settle(self, run: _Run) -> None:
        """Take down what an episode's calls were."""
        self.sessions.close(run.session)
        run.seconds = time.monotonic() - run.started
        if run.lost and run.session.finish is not None and run.session.calls:  # it could not know of the run's limits
            run.lost, run.result = "", AgentResult()
        calls: Sequence[Call] = run.session.calls
        if run.result is not None and run.result.trace is not None:
            try:
                calls = expect_recorded(run.result.trace, calls)
            except DataError as error:
                run.lost = str(error)
        roles = {} if run.result is None else run.result.scores
        if roles and not run.lost and (strangers := {call.user for call in calls} - roles.keys()):
            run.lost = (
                f"its calls name {', '.join(sorted(map(repr, strangers)))} as their user, and it has scores for {', '.join(roles)}; "
                "name the role in each call: create(..., user=ROLE)"
            )
        run.recorded = {
            role: episodes_of([call for call in calls if role is None or call.user == role], last_first=True)
            for role in roles or (None,)
        }

    # -- from calls to completions ----------------------------------------------------------------------------------

    def _group(self, runs: Sequence[_Run]) -> Group:
        prompt = runs[0].prompt
        self._refuse_strangers(runs)
        finished = [run for run in runs if not run.lost]
        first = [episode.prompt for run in finished for episode in run.episodes]
        shared = shared_part(first, banned_ids(cast(Any, self.sampler).model)) if first else prompt
        events = tuple(self._event(run) for run in runs if run.lost)
        done = tuple(_completion(run, role, shared, self.version) for run in finished for role in run.recorded)
        done = done or (_nothing(self.version),)
        return Group(
            prompt=replace(prompt, token_ids=shared.token_ids, media=shared.media), completions=done, events=events
        )

    def _refuse_strangers(self, runs: Sequence[_Run]) -> None:
        """A group shares its first tokens, if only one; episodes that begin with another are lost."""
        first = Counter(episode.prompt.token_ids[0] for run in runs if not run.lost for episode in run.episodes)
        for run in runs:
            begins = {episode.prompt.token_ids[0] for episode in run.episodes}
            if not run.lost and begins - {token for token, _ in first.most_common(1)}:
                run.lost = (
                    "its calls begin with another token than the group's; use chat completions, or one first token"
                )

    def _event(self, run: _Run) -> Event:
        sentence = f"An episode of agent {self.agent.name} on prompt {run.prompt.uid} is lost: {run.lost}."
        details = {
            "session": run.session.id,
            "calls": len(run.session.calls),
            "error": run.lost,
            "traceback": run.traceback,
        }
        return Event(kind="agent_failed", said=sentence, details=details)

    def _finish(self, runs: Sequence[_Run]) -> None:
        lost = [run for run in runs if run.lost]
        if runs and len(lost) == len(runs) and not self.may_fail:
            sentence = f"agent {self.agent.name} failed in all of its {len(runs)} episodes, first: {lost[0].lost}."
            raise DataError(f"{sentence} {lost[0].traceback}".strip())
        if runs and not any(run.session.calls for run in runs) and not self.may_fail:
            raise DataError(
                f"agent {self.agent.name} called the run's endpoint in none of its {len(runs)} episodes, so there is nothing to learn "
                "from; call the model through the `client`, or the `base_url` and `api_key`, that it is given."
            )
        calls = [len(run.session.calls) for run in runs]
        rows = [len(recorded.episodes) for run in runs if not run.lost for recorded in run.recorded.values()]
        breaks = [recorded.num_breaks for run in runs for recorded in run.recorded.values()]
        measured: dict[str, Metric] = {
            "agents/lost": Mean(len(lost), len(runs)),
            "agents/calls": Mean(sum(calls), len(calls)),
            "agents/branches": Mean(sum(max(0, count - 1) for count in rows), len(rows)),
            "agents/breaks": Mean(sum(breaks), len(runs)),
            "agents/seconds": Mean(sum(run.seconds for run in runs), len(runs)),
            "agents/max_seconds": Max(max((run.seconds for run in runs), default=0.0)),
        }
        self._metrics.append(measured)
        self.record(self.version, [_trace(run, self.agent.name) for run in runs])


def _trace(run: _Run, name: str) -> Trace:
    score = None if run.result is None else run.result.score
    return Trace(
        run.session.id, name, run.prompt.uid, tuple(run.session.calls), run.created, run.seconds, run.lost, score
    )


def _nothing(version: int) -> Completion:
    """In place of a group's lost episodes: no tokens, so nothing is learnt."""
    none = torch.zeros(0)
    ids, mask = none.long(), none.bool()
    return Completion(token_ids=ids, text="", finish="error", logprobs=none, mask=mask, version=version, messages=())


def _completion(run: _Run, role: str | None, shared: Prompt, version: int) -> Completion:
    """The last path of a role's episode, with its other paths as branches. `shared`: the group's prompt."""
    result = run.result or AgentResult()
    episodes = run.recorded[role].episodes
    scored = {"agent_score": result.score, **result.columns}
    if role is not None:
        scored |= {"agent_score": result.scores[role], "role": role}
    name = None if scored.get("role") is None else str(scored["role"])
    if not episodes:
        notes = None if name is None else EpisodeNotes(role=name)
        return replace(_nothing(version), text=result.answer or "", finish="stop", columns=scored, episode=notes)
    last, others = episodes[-1], episodes[:-1]
    notes = EpisodeNotes(
        states=last.states,
        rewards=result.turn_rewards,
        conversation=_conversation(last),
        branches=tuple(_as_completion(branch, shared) for branch in others),
        role=name,
    )
    completion = _as_completion(last, shared)
    return replace(
        completion,
        text=completion.text if result.answer is None else result.answer,
        messages=completion.messages if result.answer is None else None,
        finish=run.session.finish or completion.finish,
        tool_calls=tuple(tool_calls_in(notes.conversation)),
        episode=notes,
        columns=scored,
    )


def _as_completion(episode: Episode, shared: Prompt) -> Completion:
    """The episode as a completion of what its group shares of its prompt; its mask is False on the rest of the prompt."""
    notes = EpisodeNotes(conversation=_conversation(episode))
    return replace(behind(shared, episode.prompt, episode.completion), episode=notes)


def _conversation(episode: Episode) -> tuple[Message, ...]:
    if not episode.shown:
        return ()
    return (*episode.shown, {"role": "assistant", "content": episode.completion.text})
