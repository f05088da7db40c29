"""Groups in flight: admitted while there is room, their prompts computed once, decoded together, gone when finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.kernels import DecodeKernels
from covey.rollout.environments import Environment, Turn, replies
from covey.rollout.forward import UNLIMITED, Forward, plain_cache
from covey.rollout.kv_cache import Decode, KeyValues, Prefill, padded_rows, rounded
from covey.rollout.sampler import SamplingParams
from covey.rollout.sampling import draw, uniforms
from covey.rollout.stopping import StopStrings, check_finite, completion
from covey.types import Completion, Group, Prompt

PREFILL_TOKENS = 8192
"""Prompts are computed together up to this many tokens, padding included, which bounds the memory of activations."""
CPU_PREFILL_TOKENS = 1024
"""The same on a CPU, which is no faster with more."""

SEATS_PER_ROW = 4
"""Completions whose tokens are kept, for each that can be decoded at once: finished ones wait here for their group."""

TOKEN, POSITION, WRITTEN, LIMIT, SEAT, SLOT = range(6)
"""What is known of each row: the token to feed and its position, tokens written so far and at most, where they are
written, and the prompt's place in the cache."""


@dataclass(frozen=True)
class Job:
    """A group to write."""

    prompt: Prompt
    keys: tuple[int, ...]
    """One for each of its completions."""
    limit: int
    """Tokens that a completion may have."""

    def cache_bytes(self, forward: Forward) -> int:
        """The most it can hold: its prompt once, and every completion at full length."""
        per_token = sum(layer.bytes_per_token(forward.dtype) for layer in forward.layers)
        return per_token * (rounded(len(self.prompt.token_ids)) + len(self.keys) * rounded(self.limit))


@dataclass(eq=False)
class _Open:
    """A group in flight."""

    job: Job
    slot: int
    seats: list[int]
    written: dict[int, tuple[int, bool]]
    """Length of each finished completion by seat, and whether it ended by itself."""


class Flight:
    """One call of `sample`: the queue, the rows in flight (R of them, the first R of every table), and the cache."""

    def __init__(
        self,
        forward: Forward,
        jobs: deque[Job],
        params: SamplingParams,
        *,
        tokenizer: Any,
        eos_ids: Sequence[int],
        max_rows: int,
        cache_bytes: int,
        context: int | None,
        version: int,
        environment: Environment | None,
        between: Callable[[], None] = lambda: None,
        kernels: DecodeKernels | None = None,
    ) -> None:
        self.between, self.kernels = between, kernels
        self.forward, self.jobs, self.params, self.tokenizer = forward, jobs, params, tokenizer
        self.unfinished = list(jobs)
        self.version, self.environment = version, environment
        self.n = len(jobs[0].keys)
        self.context = context or UNLIMITED
        self.budget, self.held = cache_bytes, 0
        self.open: list[_Open | None] = []  # by slot; None where a group has finished
        self.max_rows = min(max(max_rows, self.n), len(jobs) * self.n)
        device, seats = forward.device, min(len(jobs), SEATS_PER_ROW * self.max_rows // self.n) * self.n
        longest = max(job.limit for job in jobs)
        forward.reserve(rounded(max(len(job.prompt.token_ids) for job in jobs)) + longest)
        self.cache = self._new_cache(longest)
        self.free_seats = list(range(seats))[::-1]
        self.rows = torch.zeros(6, padded_rows(self.max_rows), dtype=torch.int64, device=device)
        self.num_rows = 0
        self.tokens = torch.zeros(seats, longest, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(seats, longest, device=device)
        self.uniforms = torch.zeros(seats, longest, dtype=torch.float64, device=device)
        self.is_eos = torch.zeros(self.forward.vocab_size, dtype=torch.bool, device=device)
        self.is_eos[list(eos_ids)] = True
        self.outside = torch.full_like(self.tokens, -1) if environment is not None else None  # what an environment said
        self.stop = StopStrings.of(params.stop, tokenizer, self.forward.vocab_size)
        self.enders = self.stop.enders.to(device)
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(self.max_rows, self.forward.vocab_size, dtype=torch.bool, device=device)

    def _new_cache(self, longest: int) -> KeyValues:
        """For rows of at most `longest` tokens."""
        return plain_cache(self.forward, self.context, self.kernels)

    @property
    def is_busy(self) -> bool:
        return bool(self.jobs or self.num_rows)

    def run(self) -> list[Group]:
        """Decode until at least one group is finished."""
        finished: list[Group] = []
        while not finished and self.is_busy:
            self.between()
            self._admit()
            finished = self._step()
        return finished

    # -- in ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Take groups from the queue while there is room, and compute their prompts."""
        taken: list[Job] = []
        room = min(self.max_rows - self.num_rows, len(self.free_seats))
        while self.jobs and room >= self.n * (len(taken) + 1):
            need = self.jobs[0].cache_bytes(self.forward)
            if self.held + need > self.budget and (taken or self.num_rows):
                break
            self.held += need
            taken.append(self.jobs.popleft())
        if not taken:
            return
        self._drop_finished_prompts()
        slots = self.cache.add_prompts([len(job.prompt.token_ids) - 1 for job in taken])
        self.cache.add_rows(self.n * len(taken))
        for job, slot in zip(taken, slots, strict=True):
            self._seat(job, slot)
        self._prefill(taken, slots)
        self._arrange()

    def _seat(self, job: Job, slot: int) -> None:
        """Rows for the completions of a group; their first token is the prompt's last, computed in the first step."""
        ids = job.prompt.token_ids
        seats = [self.free_seats.pop() for _ in range(self.n)]
        self.open.append(_Open(job, slot, seats, {}))
        rows = slice(self.num_rows, self.num_rows + self.n)
        column = torch.tensor([ids[-1], len(ids) - 1, 0, job.limit, 0, slot], dtype=torch.int64)
        self.rows[:, rows] = column[:, None].to(self.rows.device)
        self.rows[SEAT, rows] = torch.tensor(seats, device=self.rows.device)
        drawn = uniforms(job.keys, job.limit)
        self.uniforms[torch.tensor(seats), : job.limit] = drawn.to(self.uniforms.device)
        if self.seen is not None:
            self.seen[rows] = False
            self.seen[rows, torch.tensor(sorted(set(ids)), device=self.seen.device)[:, None]] = True
        self.num_rows += self.n

    def _prefill(self, jobs: list[Job], slots: range) -> None:
        """Keys and values of all but the last token of the prompts, in batches of bounded size."""
        start, most = 0, CPU_PREFILL_TOKENS if self.forward.device.type == "cpu" else PREFILL_TOKENS
        while start < len(jobs):
            stop, longest = start, 0
            while stop < len(jobs):
                longest = max(longest, len(jobs[stop].prompt.token_ids) - 1)
                if stop > start and longest * (stop + 1 - start) > most:
                    break
                stop += 1
            self._prefill_batch([job.prompt.token_ids[:-1] for job in jobs[start:stop]], slots[start:stop])
            start = stop

    def _prefill_batch(self, prompts: list[tuple[int, ...]], slots: range) -> None:
        longest = max(map(len, prompts))
        if not longest:
            return
        longest = min(rounded(longest), self.context)  # whole blocks are faster, and shapes repeat
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)  # [A, L]
        for a, prompt in enumerate(prompts):
            ids[a, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        positions = torch.arange(longest).expand(len(prompts), -1)
        device = self.forward.device
        self.forward.prefill(ids.to(device), positions.to(device), Prefill(self.cache, slots))

    # -- one token --------------------------------------------------------------------------------------------------

    def _step(self) -> list[Group]:
        """One more token for every row. Returns the groups that are finished by it."""
        rows, computed = self.rows[:, : self.num_rows], self.rows[:, : self.cache.num_computed]
        self.cache.begin_step()
        logits = self.forward.decode(computed[TOKEN], computed[POSITION], Decode(self.cache))[: self.num_rows]
        self.cache.end_step()
        seat, written = rows[SEAT], rows[WRITTEN]
        seen = None if self.seen is None else self.seen[: self.num_rows]
        drawn = draw(logits, self.uniforms[seat, written], self.params, seen=seen, in_place=True)
        tokens, logprobs, is_outside = drawn.tokens, drawn.logprobs, None
        if self.outside is not None:
            said = self.outside[seat, written]
            is_outside = said >= 0
            tokens, logprobs = torch.where(is_outside, said, tokens), logprobs.masked_fill(is_outside, 0.0)
        self.tokens[seat, written], self.logprobs[seat, written] = tokens, logprobs
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        rows[TOKEN] = tokens
        rows[POSITION : WRITTEN + 1] += 1
        stops = self.is_eos[tokens]
        if self.params.stop:
            stops = stops | self._completes_stop_string(tokens)
        if is_outside is not None:
            stops &= ~is_outside
        is_full = rows[WRITTEN] >= rows[LIMIT]
        if self.environment is not None:
            stops &= ~self._continues(stops & ~is_full)
        ends = stops | is_full
        return self._retire(ends, stops) if bool(ends.any()) else []

    def _continues(self, stops: Tensor) -> Tensor:
        """[R] bool, which of the completions that `stops` marks go on because the environment answered them."""
        continues = torch.zeros_like(stops)
        asked = stops.nonzero().squeeze(-1).tolist()
        if not asked or self.environment is None or self.outside is None:
            return continues
        columns = self.rows[:, asked].T.tolist()
        turns = [self._turn(column) for column in columns]
        for row, column, reply in zip(asked, columns, replies(self.environment, turns, self.tokenizer), strict=True):
            if reply is None:
                continue
            start, stop = column[WRITTEN], min(column[WRITTEN] + len(reply), column[LIMIT])
            self.outside[column[SEAT], start:stop] = torch.tensor(reply[: stop - start], dtype=torch.int64)
            continues[row] = True
        return continues

    def _turn(self, column: list[int]) -> Turn:
        group, seat, written = self.open[column[SLOT]], column[SEAT], column[WRITTEN]
        assert group is not None  # a row in flight belongs to a group in flight
        assert self.outside is not None
        said = self.outside[seat, :written] >= 0
        last = int(said.nonzero().max()) + 1 if bool(said.any()) else 0
        ids = self.tokens[seat, :written].tolist()
        return Turn(
            prompt=group.job.prompt,
            sample=group.seats.index(seat),
            token_ids=tuple(ids),
            text=self.tokenizer.decode(ids[last:], skip_special_tokens=True),
        )

    def _completes_stop_string(self, tokens: Tensor) -> Tensor:
        found = self.enders[tokens]
        for row in found.nonzero().squeeze(-1).tolist():
            seat, written = int(self.rows[SEAT, row]), int(self.rows[WRITTEN, row])
            found[row] = self.stop.is_reached(self.tokens[seat, :written].tolist())
        return found

    # -- out --------------------------------------------------------------------------------------------------------

    def _retire(self, ends: Tensor, stops: Tensor) -> list[Group]:
        """Take the rows that ended out of the batch; the last rows move into their places."""
        ended = ends.nonzero().squeeze(-1)
        columns = self.rows[:, ended].T.tolist()
        finished = []
        for column, stopped in zip(columns, stops[ended].tolist(), strict=True):
            group = self.open[column[SLOT]]
            assert group is not None  # a row in flight belongs to a group in flight
            group.written[column[SEAT]] = (column[WRITTEN], stopped)
            if len(group.written) == self.n:
                finished.append(self._close(group))
        left = self.num_rows - len(columns)
        gone = set(ended.tolist())
        holes = [row for row in sorted(gone) if row < left]
        movers = [row for row in range(left, self.num_rows) if row not in gone]
        if holes:
            self.rows[:, holes] = self.rows[:, movers]
            if self.seen is not None:
                self.seen[holes] = self.seen[movers]
        self.rows[:, left : self.num_rows] = 0  # rows that are computed in vain must still be valid
        self.cache.drop_rows(holes, movers, left)
        self.num_rows = left
        self._arrange()
        return finished

    def _close(self, group: _Open) -> Group:
        completions = self._completions(group)
        self.unfinished = [job for job in self.unfinished if job is not group.job]
        self.open[group.slot] = None
        self.held -= group.job.cache_bytes(self.forward)
        self.free_seats += group.seats[::-1]
        if self.outside is not None:
            self.outside[group.seats] = -1
        return Group(prompt=group.job.prompt, completions=completions)

    def _completions(self, group: _Open) -> tuple[Completion, ...]:
        """Of a group whose last has ended, copied, for others write to their seats next."""
        longest = max(length for length, _ in group.written.values())
        own = lambda table: table[group.seats, :longest].cpu()
        tokens, logprobs = own(self.tokens), own(self.logprobs)
        mask = None if self.outside is None else own(self.outside) < 0
        check_finite(logprobs)  # beyond a completion's end are zeros, or what a former one was checked for
        return tuple(
            completion(
                tokens[i, :length].clone(),
                logprobs[i, :length].clone(),
                "stop" if stopped else "length",
                tokenizer=self.tokenizer,
                version=self.version,
                mask=None if mask is None else mask[i, :length].clone(),
            )
            for i, (length, stopped) in enumerate(group.written[seat] for seat in group.seats)
        )

    def _drop_finished_prompts(self) -> None:
        """Free the prefixes of finished groups."""
        kept = [slot for slot, group in enumerate(self.open) if group is not None]
        if len(kept) == len(self.open):
            return
        self.cache.drop_prompts(kept)
        new_slot = torch.zeros(len(self.open), dtype=torch.int64, device=self.rows.device)
        new_slot[kept] = torch.arange(len(kept), device=self.rows.device)
        rows = self.rows[:, : self.num_rows]
        rows[SLOT] = new_slot[rows[SLOT]]
        self.open = [group for group in self.open if group is not None]
        for slot, group in enumerate(self.open):
            assert group is not None
            group.slot = slot

    def _arrange(self) -> None:
        """Tell the cache which row belongs to which prompt; prompts without rows are dropped when they are many."""
        gone = sum(group is None for group in self.open)
        if gone > len(self.open) // (4 if self.kernels is None else 2):  # kernels do not look at them
            self._drop_finished_prompts()
        if self.num_rows:
            self.cache.arrange(self.rows[SLOT, : self.num_rows].tolist())
