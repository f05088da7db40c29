"""Joint rollouts: completions of several runs on one base model in one decode batch, each row with its run's adapter.

The base's matmuls are computed once for the rows of all runs, an adapter's for the rows of its own run. Results are bitwise those
of separate rollouts: every batch size is compared with separate decode steps before it is used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from covey.models import computing
from covey.process.interruption import StopNow
from covey.process.memory import is_out_of_memory
from covey.rollout.attention import ScoreRule
from covey.rollout.batches import DecodeBatch
from covey.rollout.decoder import WRITTEN_OUT, is_hooked
from covey.rollout.engine import NativeSampler
from covey.rollout.forward import ModulesForward
from covey.rollout.prompts import PromptLike
from covey.rollout.sampler import Sampler, SamplingParams
from covey.rollout.scheduler import Scheduler
from covey.types import Group

logger = logging.getLogger(__name__)

LEAST_ROWS, MOST_ROWS = 4, 256
"""Fewest rows of a run and most rows of a joint batch. In between, a matmul's result does not depend on the number of rows, bit for
bit (torch 2.13 on x86). With fewer rows libraries choose other kernels, and with more a joint batch saves nothing."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """A call of `sample` that a run is about to make."""

    sampler: Sampler
    prompts: Sequence[PromptLike]
    n: int
    params: SamplingParams


@dataclass(frozen=True, eq=False)
class Drawn:
    """Groups of a joint rollout in the order in which they finished, and the time it took."""

    groups: list[Group]
    seconds: float


T = TypeVar("T")
Steps = Generator[Drawing | None, Drawn | None, T]
"""Generator of a run. It yields None after every optimizer step, and before a rollout its `Drawing`: it samples the completions itself
unless they are sent in."""


def to_the_end(steps: Steps[T]) -> T:
    """Exhaust a generator. Returns its return value."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            value: T = ended.value
            return value


@dataclass(eq=False)
class JointRollouts:
    """Rollouts of several runs in one batch, and the row counts that were found to have the bits of separate ones."""

    is_equal: dict[Hashable, bool] = field(default_factory=dict)
    """Results of the comparisons, by base, rows of a run, its first row, rows of the batch, and threads."""

    def __call__(self, drawings: Sequence[Drawing]) -> list[Drawn | BaseException | None]:
        """Result of each drawing: its groups, its error, or None if it must be sampled separately, by its sampler's `sample`."""
        bases: dict[Hashable, list[int]] = {}
        for place, drawing in enumerate(drawings):
            if (base := _shared_base(drawing)) is not None:
                bases.setdefault(base, []).append(place)
        results: list[Drawn | BaseException | None] = [None] * len(drawings)
        for base, places in bases.items():
            if len(places) > 1:
                drawn = self._drawn([drawings[place] for place in places], hash(base))
                for place, result in zip(places, drawn, strict=True):
                    results[place] = result
        return results

    def _drawn(self, drawings: Sequence[Drawing], base: int) -> list[Drawn | BaseException | None]:
        started = time.perf_counter()
        runs = [_Run(drawing) for drawing in drawings]
        forward = _JointForward([run.forward for run in runs], base)
        try:
            with ExitStack() as stack:
                for run in runs:
                    stack.enter_context(run.forward.evaluating())
                while any(run.is_busy for run in runs):
                    self._step(forward, runs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            for run in runs:
                run.is_alone = True
        seconds = time.perf_counter() - started
        if num_alone := sum(run.is_alone for run in runs):
            logger.warning("Memory ran out in a joint rollout; %d of its %d runs draw alone.", num_alone, len(runs))
        return [None if run.is_alone else run.error or Drawn(run.groups, seconds) for run in runs]

    def _step(self, forward: _JointForward, runs: Sequence[_Run]) -> None:
        """One token more of every row of every run."""
        for run in runs:
            run.begin()
        joined: list[int] = []
        for place, run in enumerate(runs):
            total = sum(len(runs[other].ids) for other in joined) + len(run.ids)
            if run.is_busy and len(run.ids) >= LEAST_ROWS and total <= MOST_ROWS:
                joined.append(place)
        logits: dict[int, Tensor] = {}
        if len(joined) > 1:
            logits = self._joint_logits(forward, runs, joined)
        for place, run in enumerate(runs):
            if run.is_busy:
                run.end(logits.get(place))

    def _joint_logits(self, forward: _JointForward, runs: Sequence[_Run], joined: Sequence[int]) -> dict[int, Tensor]:
        """Logits [R, V] of the joined runs whose bits equal those of separate steps."""
        total, start = sum(len(runs[place].ids) for place in joined), 0
        keys: dict[int, Hashable] = {}
        for place in joined:
            keys[place] = forward.base, len(runs[place].ids), start, total, torch.get_num_threads()
            start += len(runs[place].ids)
        logits = dict(zip(joined, forward.decode(runs, joined), strict=True))
        for place, key in keys.items():
            if key not in self.is_equal:
                self.is_equal[key] = torch.equal(logits[place], runs[place].decode())
        return {place: logits[place] for place, key in keys.items() if self.is_equal[key]}


class _Run:
    """One run of a joint rollout. An error of its own ends it, not the others."""

    def __init__(self, drawing: Drawing) -> None:
        sampler = drawing.sampler
        assert isinstance(sampler, NativeSampler)
        assert isinstance(sampler.forward, ModulesForward)
        self.forward = sampler.forward
        self.groups: list[Group] = []
        self.error: BaseException | None = None
        self.is_alone = False
        """True after running out of memory: the run is then sampled separately, in smaller batches."""
        self.scheduler: Scheduler | None = None
        self.ids = self.positions = torch.zeros(0, dtype=torch.int64)
        with self._recording_errors():
            self.scheduler = sampler.begin(drawing.prompts, drawing.n, drawing.params)

    @property
    def is_busy(self) -> bool:
        has_ended = self.is_alone or self.error is not None
        return not has_ended and self.scheduler is not None and self.scheduler.is_busy

    @contextmanager
    def _recording_errors(self) -> Iterator[None]:
        try:
            yield
        except (Exception, StopNow) as error:  # noqa: BLE001 - raised in its own run
            self.is_alone = is_out_of_memory(error)
            self.error = error

    def begin(self) -> None:
        """Admit groups, and take the input [R] of the next step; empty at the end."""
        if self.is_busy and self.scheduler is not None:
            with self._recording_errors():
                self.ids, self.positions = self.scheduler.begin_step()

    def decode(self) -> Tensor:
        """[R, V] logits of this run alone; the same step may be decoded again."""
        assert self.scheduler is not None
        return self.forward.decode(self.ids, self.positions, DecodeBatch(self.scheduler.cache))

    def end(self, logits: Tensor | None) -> None:
        """Draw from the logits of a joint step; None: from those of a step of its own."""
        if self.scheduler is not None:
            with self._recording_errors():
                self.groups += self.scheduler.end_step(self.decode() if logits is None else logits)


class _JointForward:
    """Forward pass of the first run's modules on the rows of several runs; an adapted layer is computed by each run on its own rows.

    Such a layer gets its rows of the base's matmul, computed once for all runs, in place of its own base layer's result.
    """

    def __init__(self, forwards: Sequence[ModulesForward], base: int) -> None:
        """`base` tells the shared base from others in this process."""
        self.base = base
        self.carrier = forwards[0]
        layers = [_layers_of(forward.model) for forward in forwards]
        self.adapted = {
            path: [by_path[path] for by_path in layers]
            for path in layers[0]
            if any(_base_of(by_path[path]) for by_path in layers)
        }

    def decode(self, runs: Sequence[_Run], joined: Sequence[int]) -> list[Tensor]:
        """[R, V] logits of each of these runs."""
        together = [runs[place] for place in joined]
        sizes = [len(run.ids) for run in together]
        ids, positions = (torch.cat([getattr(run, name) for run in together]) for name in ("ids", "positions"))
        schedulers = [run.scheduler for run in together if run.scheduler is not None]
        batch = _JointBatch([DecodeBatch(scheduler.cache) for scheduler in schedulers], sizes)
        with ExitStack() as stack:
            for layers in self.adapted.values():
                _route(stack, layers[0], [layers[place] for place in joined], sizes)
            logits = self.carrier.decode(ids, positions, batch)
        return list(logits.split(sizes))


@dataclass(frozen=True, eq=False)
class _JointBatch:
    """Decode batch over the KV caches of several runs."""

    batches: Sequence[DecodeBatch]
    sizes: Sequence[int]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """[R, 1, Hq, D]; see `Batch`."""
        rows = zip(self.batches, *(x.split(list(self.sizes)) for x in (query, key, value)), strict=True)
        return torch.cat([batch.attend(layer, *rest, rule) for batch, *rest in rows])


def _route(stack: ExitStack, carrier: Any, layers: Sequence[Any], sizes: Sequence[int]) -> None:
    """Make the layer `carrier` compute each of `layers` on its rows, with one base matmul, until the stack is closed."""
    base = _base_of(carrier) or carrier
    product = base.forward

    def forward(x: Tensor) -> Tensor:
        out = []
        for layer, inputs, done in zip(layers, x.split(list(sizes)), product(x).split(list(sizes)), strict=True):
            of_layer = _base_of(layer)
            if of_layer is None:
                out.append(done)
                continue
            with computing(of_layer, lambda x, done=done: done):  # type: ignore[misc]
                # copied, so that it is aligned as in a separate rollout
                out.append(type(layer).forward(layer, inputs.clone()))
        return torch.cat(out)

    stack.enter_context(computing(carrier, forward))


def _base_of(layer: Any) -> Any:
    """The layer inside of an adapter's; None for another layer."""
    inner: Callable[[], Any] | None = getattr(layer, "get_base_layer", None)
    return None if inner is None else inner()


def _layers_of(module: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """Modules with weights of their own, by path; an adapter's layer stands for the layer inside."""
    if _base_of(module) is not None or not list(module.children()):
        return {path: module}
    by_path: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        by_path |= _layers_of(child, f"{path}.{name}")
    return by_path


def _shared_base(drawing: Drawing) -> Hashable | None:
    """Addresses of the base's weights by layer, equal for runs that can be joined. None for a run that must be sampled separately.

    Only models whose rows do not depend on each other, and that decode with their own modules, in float32 on a CPU.
    """
    sampler = drawing.sampler
    if type(sampler) is not NativeSampler or sampler.is_static or sampler.environment is not None:
        return None
    forward = sampler.forward
    if type(forward) is not ModulesForward or type(forward.model).__name__ not in WRITTEN_OUT:
        return None
    is_plain = forward.device.type == "cpu" and forward.dtype == torch.float32 and drawing.params.seed is not None
    if not is_plain or any(is_hooked(module) for module in forward.model.modules()):
        return None
    layers = {path: _base_of(layer) or layer for path, layer in _layers_of(forward.model).items()}
    weights = lambda layer: tuple(id(weight) for weight in layer.parameters())
    return tuple((path, type(layer), weights(layer)) for path, layer in layers.items())
