"""The native engine: groups are admitted, computed once, decoded together, and leave as soon as they are finished."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from covey.errors import ConfigError
from covey.rollout.cache import Decode, KeyValues, Prefill, padded_rows, rounded
from covey.rollout.decoder import CopyForward, DecoderForward
from covey.rollout.forward import Forward, ModulesForward, verify
from covey.rollout.linear import has_bfloat16
from covey.rollout.mode import evaluating, unwrapped
from covey.rollout.prompts import PromptLike, as_prompts, occurrences
from covey.rollout.sampler import SamplingParams, Unsupported
from covey.rollout.sampling import draw, fresh_seed, sequence_key, uniforms
from covey.rollout.stopping import StopStrings, checked_eos_ids, completion, context_of
from covey.types import Completion, Group, Prompt

PREFILL_TOKENS = 8192
"""Prompts are computed together up to this many tokens, padding included, which bounds the memory of activations."""

TOKEN, POSITION, WRITTEN, LIMIT, SEAT, SLOT = range(6)
"""What is known of each row: the token to feed and its position, tokens written so far and at most, where they are
written, and the prompt's place in the cache."""


@dataclass(frozen=True)
class _Job:
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


Precision = Literal["auto", "float32", "bfloat16"]


BFLOAT16_FROM = 4_000_000
"""Parameters from which "auto" trades exactness for speed: 2.5 times at 10 million, 1.6 times of very little at 1 million."""


def best_forward(model: Any, dtype: Precision) -> Forward:
    """The fastest way to compute this model in this precision; see `NativeSampler`. Raises Unsupported with the reason."""
    live = next(unwrapped(model).parameters())
    wanted = live.dtype if dtype == "auto" else getattr(torch, dtype)
    is_large = sum(parameter.numel() for parameter in unwrapped(model).parameters()) >= BFLOAT16_FROM
    if dtype == "auto" and live.dtype == torch.float32 and has_bfloat16(live.device) and is_large:
        wanted = torch.bfloat16
    if wanted != live.dtype and not (wanted == torch.bfloat16 and has_bfloat16(live.device)):
        raise Unsupported(f"the model is in {live.dtype} and cannot be sampled from in {wanted} on this processor")
    try:
        return DecoderForward(model, wanted)
    except Unsupported:
        return ModulesForward(model) if wanted == live.dtype else CopyForward(model)


class NativeSampler:
    """Samples groups with the trainer's own weights: prompts computed and stored once, finished rows replaced at once.

    `NativeSampler(model, tokenizer)` then `for group in sampler.sample(prompts, n=8, params=SamplingParams(...))`.
    Groups come in the order in which they finish. Raises `Unsupported`, with the reason, for a model it cannot run exactly.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int] | None = None,
        dtype: Precision = "auto",
        max_rows: int = 256,
        cache_bytes: int | None = None,
    ) -> None:
        """`eos_ids` default to those that the model's generation config and the tokenizer name.

        `dtype` is what is computed in: the model's own with "auto", except that a CPU which multiplies bfloat16 in
        hardware uses a bfloat16 copy of a float32 model that is not tiny. "float32" never copies and is exact.

        At most `max_rows` completions, and groups that can hold at most `cache_bytes` of keys and values, are in flight
        at once (but always one group). By default half of the memory that is free when sampling begins.
        """
        if max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; give at least 1.")
        if dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype {dtype!r} is not known to the sampler; take auto, float32 or bfloat16.")
        self.dtype: Precision = dtype
        self.tokenizer = tokenizer
        self.eos_ids = checked_eos_ids(eos_ids, unwrapped(model), tokenizer)
        self.max_rows, self.cache_bytes = max_rows, cache_bytes
        self.forward = best_forward(model, dtype)
        verify(self.forward, model)
        self.model, self.version = model, 0

    def load(self, policy: Any, version: int) -> None:
        """Sample with this model, as it is now, from now on."""
        if policy is not self.model or not self.forward.refresh():
            self.forward = best_forward(policy, self.dtype)
            verify(self.forward, policy)
        self.model, self.version = policy, version

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish."""
        if n < 1:
            raise ConfigError(f"n is {n}; a group needs at least 1 completion.")
        context = context_of(unwrapped(self.model))
        known = as_prompts(prompts, self.tokenizer, context)
        seed = fresh_seed(params)
        jobs: deque[_Job] = deque()
        for prompt, occurrence in zip(known, occurrences(known), strict=True):
            room = params.max_tokens if context is None else min(params.max_tokens, context - len(prompt.token_ids))
            keys = tuple(sequence_key(seed, prompt.uid, occurrence, sample) for sample in range(n))
            jobs.append(_Job(prompt, keys, room))
        return self._groups(jobs, n, params)

    def _groups(self, jobs: deque[_Job], n: int, params: SamplingParams) -> Iterator[Group]:
        if not jobs:
            return
        flight = _Flight(self, jobs, n, params)
        while flight.is_busy:
            with evaluating(self.model):
                groups = flight.run()
            yield from groups

    def budget(self) -> int:
        """Bytes of keys and values that may be held."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        device = self.forward.device
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0] // 2
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@dataclass(eq=False)
class _Open:
    """A group in flight."""

    job: _Job
    slot: int
    seats: list[int]
    written: dict[int, tuple[int, bool]]
    """Length of each finished completion by seat, and whether it ended by itself."""


class _Flight:
    """One call of `sample`: the queue, the rows in flight (R of them, the first R of every table), and the cache."""

    def __init__(self, sampler: NativeSampler, jobs: deque[_Job], n: int, params: SamplingParams) -> None:
        self.sampler, self.forward, self.jobs, self.n, self.params = sampler, sampler.forward, jobs, n, params
        self.version = sampler.version
        device = self.forward.device
        context = context_of(unwrapped(sampler.model)) or 2**31
        self.cache = KeyValues(self.forward.layers, device, self.forward.dtype, context)
        self.budget = sampler.budget()
        self.held = 0
        self.open: list[_Open | None] = []  # by slot; None where a group has finished
        seats = max(1, min(len(jobs), sampler.max_rows // n)) * n
        longest = max(job.limit for job in jobs)
        self.free_seats = list(range(seats))[::-1]
        self.rows = torch.zeros(6, padded_rows(seats), dtype=torch.int64, device=device)
        self.num_rows = 0
        self.tokens = torch.zeros(seats, longest, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(seats, longest, device=device)
        self.uniforms = torch.zeros(seats, longest, dtype=torch.float64, device=device)
        self.is_eos = torch.zeros(self.forward.vocab_size, dtype=torch.bool, device=device)
        self.is_eos[list(sampler.eos_ids)] = True
        self.stop = StopStrings.of(params.stop, sampler.tokenizer, self.forward.vocab_size)
        self.enders = self.stop.enders.to(device)
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(seats, self.forward.vocab_size, dtype=torch.bool, device=device)

    @property
    def is_busy(self) -> bool:
        return bool(self.jobs or self.num_rows)

    def run(self) -> list[Group]:
        """Decode until at least one group is finished."""
        finished: list[Group] = []
        while not finished and self.is_busy:
            self._admit()
            finished = self._step()
        return finished

    # -- in ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Take groups from the queue while there is room, and compute their prompts."""
        taken: list[_Job] = []
        while self.jobs and len(self.free_seats) >= self.n * (len(taken) + 1):
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

    def _seat(self, job: _Job, slot: int) -> None:
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

    def _prefill(self, jobs: list[_Job], slots: range) -> None:
        """Keys and values of all but the last token of the prompts, in batches of bounded size."""
        start = 0
        while start < len(jobs):
            stop, longest = start, 0
            while stop < len(jobs):
                longest = max(longest, len(jobs[stop].prompt.token_ids) - 1)
                if stop > start and longest * (stop + 1 - start) > PREFILL_TOKENS:
                    break
                stop += 1
            self._prefill_batch([job.prompt.token_ids[:-1] for job in jobs[start:stop]], slots[start:stop])
            start = stop

    def _prefill_batch(self, prompts: list[tuple[int, ...]], slots: range) -> None:
        longest = max(map(len, prompts))
        if not longest:
            return
        room = context_of(unwrapped(self.sampler.model)) or rounded(longest)
        longest = min(rounded(longest), room)  # whole blocks are faster, and shapes repeat
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
        drawn = draw(logits, self.uniforms[seat, written], self.params, seen=seen)
        self.tokens[seat, written], self.logprobs[seat, written] = drawn.tokens, drawn.logprobs
        if seen is not None:
            seen.scatter_(1, drawn.tokens[:, None], True)
        rows[TOKEN] = drawn.tokens
        rows[POSITION : WRITTEN + 1] += 1
        stops = self.is_eos[drawn.tokens]
        if self.params.stop:
            stops = stops | self._completes_stop_string(drawn.tokens)
        ends = stops | (rows[WRITTEN] >= rows[LIMIT])
        return self._retire(ends, stops) if bool(ends.any()) else []

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
        self.open[group.slot] = None
        self.held -= group.job.cache_bytes(self.forward)
        self.free_seats += group.seats[::-1]
        return Group(
            prompt=group.job.prompt,
            completions=tuple(self._completion(seat, *group.written[seat]) for seat in group.seats),
        )

    def _completion(self, seat: int, length: int, stopped: bool) -> Completion:
        return completion(
            self.tokens[seat, :length].cpu().clone(),
            self.logprobs[seat, :length].cpu().clone(),
            "stop" if stopped else "length",
            tokenizer=self.sampler.tokenizer,
            version=self.version,
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
        if sum(group is None for group in self.open) > len(self.open) // 4:
            self._drop_finished_prompts()
        if self.num_rows:
            self.cache.arrange(self.rows[SLOT, : self.num_rows].tolist())
