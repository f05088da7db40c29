"""Asynchronous rollouts: a sampler whose completions are generated in other processes while the learner updates.

The caller of `order` decides which rollouts are generated ahead (`covey.rollout.ahead`). Every ordered rollout is delivered, so no
completion is discarded.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from covey.errors import CoveyError
from covey.models import context_limit, unwrapped
from covey.rollout.model_copies import packed
from covey.rollout.prompts import PromptLike, as_prompts, with_distinct_uids
from covey.rollout.sampler import SamplingParams
from covey.rollout.worker import Order
from covey.rollout.worker_process import Worker
from covey.types import Group, Mean, Metric, Prompt, merge_metrics

logger = logging.getLogger(__name__)

DEATHS_IN_A_ROW = 3
"""Consecutive worker deaths without a single delivered group after which the run fails."""
_LOOK_SECONDS = 0.05
"""Polling interval for a stop signal while no message arrives."""

Start = Callable[[Any, bytes, int, Callable[[tuple[Any, ...]], None], int], Worker]
"""Worker factory `(model, content, version, tell, place)`; `place`: the worker's number, from 0; `content`: the model with its current weights, and the tokenizer, by `pack`."""
Pack = Callable[[Any, Any], bytes]


@dataclass(eq=False)
class RolloutOrder:
    """An ordered rollout: the request, and the groups that have arrived."""

    prompts: tuple[Prompt, ...]
    n: int
    params: SamplingParams
    at_least: int
    """Oldest weight version with which a worker may start a group of this rollout."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Finished groups by the uid of their prompt."""
    is_delivered: bool = False

    @property
    def is_finished(self) -> bool:
        return len(self.groups) == len(self.prompts)

    def is_of(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> bool:
        mine = [prompt.uid for prompt in self.prompts]
        return self.n == n and self.params == params and mine == [prompt.uid for prompt in prompts]


class AsynchronousSampler:
    """A `Sampler` over worker processes. `order` requests a rollout; `sample` with the same arguments delivers it.

    A call of `sample` without an order (evaluations, greedy answers) is queued behind the orders and waits for its groups.
    A worker that ends is replaced, and its undelivered groups are drawn again with the same seeds.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        start: Start,
        workers: int = 1,
        check_stop: Callable[[], None] = lambda: None,
        pack: Pack = packed,
        keeps_columns: bool = False,
        takes_newest: bool = True,
        forget: Callable[[Sequence[Group]], None] = lambda groups: None,
    ) -> None:
        """`keeps_columns`: the workers read the prompts' columns, as environments do. `takes_newest`: as of `Setup`.

        `forget` receives groups once they have been scored, or are dropped: what they hold, such as environments, is free then.
        """
        self.model, self.tokenizer, self.start, self.num_workers = model, tokenizer, start, workers
        self.pack, self.keeps_columns, self.forget = pack, keeps_columns, forget
        self.takes_newest = takes_newest
        self._scored: list[Group] = []
        """Groups that were delivered without an order, and are scored by the next call."""
        self.check_stop = check_stop
        """Callback while waiting for groups; its exception ends the wait, but the workers go on."""
        self.version = 0
        self.orders: dict[int, RolloutOrder] = {}
        """Ordered rollouts by number, oldest first."""
        self._orders = 0
        self._workers: list[Worker] = []
        self._inbox: queue.Queue[tuple[int, int, tuple[Any, ...]]] = queue.Queue()
        self._generation = 0
        """Number of workers started so far: messages of a replaced worker carry an older one and are dropped."""
        self._ids: list[int] = []
        self._unpublished: set[int] = set()
        """Indices of workers that have not received the newest weights yet."""
        self._loaded_at: dict[int, float] = {}
        self._deaths = 0
        self._measured: list[Mapping[str, Metric]] = []
        self.replaced = 0
        """Number of workers that ended and were replaced so far."""
        self._clock = _Clock()

    # -- the sampler interface --------------------------------------------------------------------------------------

    def load(self, policy: Any, version: int) -> None:
        """Publish new weights: each worker takes them at its next group or token boundary."""
        if policy is not self.model or version < self.version:
            self.close()
            self.model = policy
        self.version = version
        self._loaded_at = {version: time.monotonic()}
        self._unpublished = set(range(len(self._workers)))
        self._pump()

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish."""
        originals = as_prompts(prompts, self.tokenizer, context_limit(unwrapped(self.model)))
        self._forget_scored()
        if not originals:
            return
        encoded = with_distinct_uids(originals)
        by_uid = {distinct.uid: prompt for distinct, prompt in zip(encoded, originals, strict=True)}
        ordered = next((key for key, order in self.orders.items() if order.is_of(encoded, n, params)), None)
        number = self.order(encoded, n, params, self.version) if ordered is None else ordered
        try:
            for group in self._delivered(number, encoded):
                yield with_columns(group, by_uid[group.prompt.uid])
        finally:
            if ordered is None:
                self._scored += self.orders.pop(number).groups.values()
        if ordered is not None:  # kept until the loop has consumed it: `forget_first`
            self.orders[number].is_delivered = True

    def _delivered(self, number: int, prompts: Sequence[Prompt]) -> Iterator[Group]:
        order, delivered = self.orders[number], set[str]()
        while True:
            for prompt in prompts:
                if prompt.uid in order.groups and prompt.uid not in delivered:
                    delivered.add(prompt.uid)
                    yield order.groups[prompt.uid]
            if len(delivered) == len(prompts):
                return
            self._wait()

    # -- running ahead ----------------------------------------------------------------------------------------------

    def order(self, prompts: Sequence[Prompt], n: int, params: SamplingParams, at_least: int) -> int:
        """Request groups, to be delivered by `sample` with the same arguments. Returns the order's number."""
        self._forget_scored()
        number, self._orders = self._orders, self._orders + 1
        self.orders[number] = RolloutOrder(tuple(with_distinct_uids(prompts)), n, params, at_least)
        if self._workers:
            self._pump()
            for place in range(len(self._workers)):
                self._send(place, number)
        else:
            self._start_all()
        places = range(len(prompts))  # a worker without a share takes no weights meanwhile
        while not self.takes_newest and self._unpublished.intersection(places):
            self._wait()  # the next weights would take the place of the order's
        return number

    def forget_first(self) -> int:
        """Drop the oldest order, if there is one. Returns its number of tokens that were generated and never delivered."""
        if not self.orders:
            return 0
        order = self.orders.pop(next(iter(self.orders)))
        self.forget(list(order.groups.values()))
        written = sum(completion.num_tokens for group in order.groups.values() for completion in group.completions)
        return 0 if order.is_delivered else written

    def _forget_scored(self) -> None:
        scored, self._scored = self._scored, []
        self.forget(scored)

    def finish(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until all ordered groups have arrived, or until `is_enough()`. Starts no worker."""
        while self._workers and not is_enough() and any(not order.is_finished for order in self.orders.values()):
            self._wait()

    def state_dict(self) -> dict[str, Any]:
        """Orders not consumed yet, with the groups that have arrived."""
        self._pump()
        orders = [
            {
                "prompts": list(order.prompts),
                "n": order.n,
                "params": asdict(order.params),
                "groups": [
                    order.groups[prompt.uid]
                    for prompt in order.prompts
                    if prompt.uid in order.groups and _can_be_saved(order.groups[prompt.uid])
                ],
            }
            for order in self.orders.values()
        ]
        return {"orders": orders}

    def load_state_dict(
        self, state: Mapping[str, Any], again: Callable[[Prompt], Prompt] = lambda prompt: prompt
    ) -> None:
        """Resume the orders of a checkpoint: groups that had arrived are kept, the others are drawn with the same seeds.

        `again` restores all data set columns of a saved prompt.
        """
        self.close()
        while self.orders:
            self.forget_first()
        for saved in state["orders"]:
            prompts = tuple(again(prompt) for prompt in saved["prompts"])
            order = RolloutOrder(prompts, saved["n"], SamplingParams(**saved["params"]), at_least=0)
            order.groups = {group.prompt.uid: group for group in saved["groups"]}
            self.orders[self._orders] = order
            self._orders += 1

    def take_metrics(self) -> dict[str, Metric]:
        """Metrics since the last call: those of the workers' samplers, idle fractions of workers and learner, publish lag."""
        self._pump()
        measured, self._measured = self._measured, []
        return {**merge_metrics(measured), **self._clock.take(max(1, self.num_workers))}

    def close(self) -> None:
        """Shut the workers down; the next order starts new ones."""
        for worker in self._workers:
            worker.close()
        self._workers, self._ids, self._unpublished = [], [], set()

    # -- workers ----------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        content = self.pack(self.model, self.tokenizer)
        for place in range(self.num_workers):
            self._start(place, content)

    def _start(self, place: int, content: bytes) -> None:
        """Start worker number `place` with the newest weights, `content`, and send it its undelivered share of every order."""
        self._generation += 1
        generation = self._generation
        worker = self.start(
            self.model, content, self.version, lambda message: self._inbox.put((place, generation, message)), place
        )
        self._workers[place : place + 1] = [worker]
        self._ids[place : place + 1] = [generation]
        self._unpublished.discard(place)
        for number in self.orders:
            self._send(place, number)

    def _send(self, place: int, number: int) -> None:
        """Send a worker its share of an order: every `num_workers`-th prompt, without those that have arrived."""
        order = self.orders[number]
        share = [p for p in order.prompts[place :: self.num_workers] if p.uid not in order.groups]
        if share:
            plain = tuple(share) if self.keeps_columns else tuple(replace(prompt, columns={}) for prompt in share)
            at_least = min(order.at_least, self.version)
            self._workers[place].send(Order(number, plain, order.n, order.params, at_least))

    def _wait(self) -> None:
        """Block until a worker has sent a message. Raises the exceptions of `check_stop`, and the error of a worker."""
        if not self._workers:
            self._start_all()
        started = time.monotonic()
        try:
            self._pump(_LOOK_SECONDS)
        finally:
            self._clock.waited += time.monotonic() - started
        self.check_stop()

    def _pump(self, seconds: float = 0.0) -> None:
        """Process the messages of workers, waiting up to `seconds` for the first, and publish weights to workers that can take them."""
        for place in sorted(self._unpublished):
            if self._workers[place].publish(self.version):
                self._unpublished.discard(place)
        try:
            place, generation, message = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            while True:
                if place < len(self._ids) and self._ids[place] == generation:
                    self._hear(place, message)
                elif message[0] == "group":
                    self.forget([message[2]])
                place, generation, message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _hear(self, place: int, message: tuple[Any, ...]) -> None:
        match message:
            case ("group", number, group):
                self._deaths = 0
                if number in self.orders:
                    self.orders[number].groups[group.prompt.uid] = group
                else:
                    self.forget([group])
            case ("began", _, when):
                self._clock.begin(place, when)
            case ("done", _, when):
                self._clock.end(place, when)
            case ("took", version, when):
                if version in self._loaded_at:
                    self._clock.lags.append(max(0.0, when - self._loaded_at[version]))
            case ("measured", metrics):
                self._measured.append(metrics)
            case ("failed", error):
                self.close()
                raise error
            case ("gone", words):
                self._replace(place, words)

    def _replace(self, place: int, words: str) -> None:
        self._deaths += 1
        if self._deaths > DEATHS_IN_A_ROW:
            self.close()
            raise CoveyError(
                f"{words}, {self._deaths} times in a row without a finished group; look at the machine's memory."
            )
        logger.warning("%s; another one takes its place and draws its groups again, with the same seeds.", words)
        self._clock.end(place, time.monotonic())
        self._workers[place].close()
        self.replaced += 1
        self._start(place, self.pack(self.model, self.tokenizer))


def _can_be_saved(group: Group) -> bool:
    """False for a group with objects of the user's, such as environments: it is drawn again, with the same seeds."""
    values = [value for completion in group.completions for value in completion.columns.values()]
    return all(value is None or isinstance(value, str | int | float) for value in values)


@dataclass(eq=False)
class _Clock:
    """Idle times of learner and sampler since the last reading, by `time.monotonic`, which all processes of a machine share."""

    since: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    """Seconds that the learner waited for groups."""
    busy: float = 0.0
    """Seconds of generation, summed over workers."""
    running: dict[int, float] = field(default_factory=dict)
    """Start time of each worker's current order, or the last time that it was read."""
    lags: list[float] = field(default_factory=list)

    def begin(self, place: int, when: float) -> None:
        self.running[place] = max(when, self.since)

    def end(self, place: int, when: float) -> None:
        self.busy += max(0.0, when - self.running.pop(place, when))

    def take(self, workers: int) -> dict[str, Metric]:
        now = time.monotonic()
        for place in list(self.running):
            self.end(place, now)
            self.running[place] = now
        elapsed = max(now - self.since, 1e-9)
        lags, self.lags = self.lags, []
        metrics: dict[str, Metric] = {
            "idle/learner": Mean(min(1.0, self.waited / elapsed), 1),
            "idle/sampler": Mean(max(0.0, 1.0 - self.busy / (elapsed * workers)), 1),
        }
        if lags:
            metrics["publish_lag"] = Mean(sum(lags), len(lags))
        self.since, self.waited, self.busy = now, 0.0, 0.0
        return metrics


def with_columns(group: Group, prompt: Prompt) -> Group:
    """A worker's group with the columns and images of the ordered prompt. Its tokens stay, which an environment or agent may have changed."""
    shown = group.prompt
    before = None if shown.before is None else prompt
    written = {name: getattr(shown, name) for name in ("token_ids", "messages", "text", "tools")}
    merged = replace(prompt, **written, before=before)
    return replace(group, prompt=merged)
