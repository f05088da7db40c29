"""The teachers of an algorithm: other models, or the policy itself at some time, with a hint in its prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from covey.learner.context_parallel import takes
from covey.learner.logprobs import Head, score_tokens
from covey.learner.packing import PaddedRows, Row, pad_rows
from covey.learner.policy import Policy
from covey.learner.reference import AdapterCopy, FrozenCopy
from covey.learner.shared_prompt import SharedRows
from covey.learner.signals import Other, Share, Signal, hidden_of
from covey.learner.text_alignment import Aligned, TextAlignment, over_policy
from covey.process.device import onto
from covey.types import Group, Prompt, ReferenceRule, StepReport

Hints = Callable[[Group], Sequence[str | None]]
"""Function from a group to the teacher's feedback on each completion; None: no feedback."""


@dataclass(frozen=True, eq=False)
class Following:
    """Weights of a teacher that follow the policy's by a rule, as a reference does."""

    copy: FrozenCopy | AdapterCopy
    rule: ReferenceRule
    is_constant: bool = False
    """True if it is saved elsewhere and never moves: the run's frozen reference, or an adapter in a folder."""


@dataclass(frozen=True, eq=False)
class Teacher:
    """A frozen model at the completions of the policy: distances over the whole vocabulary, log-probabilities of the tokens."""

    policy: Policy
    """The teacher model; in self-distillation, it may share the trained weights."""
    distance: Callable[[Tensor, Tensor], Tensor] | None = None
    """(logp [m, V], teacher's logp [m, V]) -> [m]; None: log-probabilities of the tokens alone."""
    hints: Hints | None = None
    hinted: Callable[[Prompt, str], tuple[int, ...]] = lambda prompt, hint: prompt.token_ids
    """Token ids of the prompt with the hint inserted."""
    entropy_sensitivity: float = 0.0
    """Weigh positions with a hint by `exp(-entropy_sensitivity H)`, H the entropy of this model there; 0: no weights."""
    overlap_k: int | None = None
    """Measure the share of the k likeliest tokens that it has in common with the policy; None: not."""
    needs_hint: bool = False
    """True if it has nothing to teach without a hint."""
    following: Following | None = None
    """Weights of its own; None: those of `policy`."""
    alignment: TextAlignment | None = None
    """Its own tokenizer, for a teacher that reads other tokens than the policy writes. None: they are the same."""

    def at(self, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Signal:
        """The teacher at the policy's positions: `rows`, in the order of `packed`."""
        return signal_of(self, packed, rows)

    def speak(
        self, packed: PaddedRows | SharedRows, rows: Sequence[Row], chosen: Sequence[int] | None, share: float
    ) -> tuple[Share, list[bool]]:
        """The teacher at the positions of the chosen rows, by default of all, and for each of these True if it can teach it."""
        mine = rows if chosen is None else [rows[i] for i in chosen]
        informed = [row.hint is not None or not self.needs_hint for row in mine]
        return self.share(packed, rows, chosen, share), informed

    def share(
        self,
        packed: PaddedRows | SharedRows,
        rows: Sequence[Row],
        chosen: Sequence[int] | None = None,
        share: float = 1.0,
    ) -> Share:
        """The teacher at the positions of the chosen rows, by default of all."""
        if self.alignment is not None:
            return self._share_of_text(packed, rows, range(len(rows)) if chosen is None else chosen, share)
        hinted = [self._with_hint(rows[i]) for i in (range(len(rows)) if chosen is None else chosen)]
        is_same = chosen is None and all(row.hint is None for row in rows)
        is_same = is_same and takes(self.policy, packed)
        mine = packed if is_same else pad_rows(hinted, self.policy.pad_id, self.policy.device)
        with self._still():
            hidden, head = hidden_of(self.policy, mine)
            self.policy.release()
            places = torch.arange(len(packed.place), device=packed.place.device)
            if mine is not packed:
                hidden, places = _aligned(hidden, mine, packed, chosen)
            logp = self._logp(hidden, head, packed.target[places]) if self.distance is None else None
            weight = self._weights(hidden, head, packed, places, rows) if self.entropy_sensitivity else None
        other = None if self.distance is None else Other(hidden, head, self.distance, self.overlap_k)
        return Share(places, other, share, logp, weight)

    def _share_of_text(
        self, packed: PaddedRows | SharedRows, rows: Sequence[Row], chosen: Sequence[int], share: float
    ) -> Share:
        """The share of a teacher of another tokenizer: log-probabilities of the spans of text that both share."""
        assert self.alignment is not None
        aligned = [self.alignment(rows[i]) for i in chosen]
        theirs = pad_rows(
            [text.row(rows[i]) for text, i in zip(aligned, chosen, strict=True)], self.policy.pad_id, self.policy.device
        )
        with self._still():
            hidden, head = hidden_of(self.policy, theirs)
            self.policy.release()
            logp = theirs.spread(self._logp(hidden, head, theirs.target))
        return share_of_text(
            packed,
            aligned,
            [row[: len(text.completion)] for text, row in zip(aligned, logp, strict=True)],
            chosen,
            share,
        )

    @property
    def is_split(self) -> bool:
        return self.policy.shards is not None

    def follow(self, policy: Policy, report: StepReport) -> None:
        """Move the weights towards the policy's, as the rule says after the step of `report`."""
        if self.following is not None and not self.following.is_constant:
            self.following.copy.mix(policy, self.following.rule(report))

    def state_dict(self) -> dict[str, Tensor]:
        """Weights for a checkpoint; empty where they are another's, or still those of the start."""
        return {} if self.following is None or self.following.is_constant else self.following.copy.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.following is not None and not self.following.is_constant and state:
            self.following.copy.load_state_dict(state)

    @torch.no_grad()
    def _logp(self, hidden: Tensor, head: Head, target: Tensor) -> Tensor:
        chunk, temperature = self.policy.logits_chunk, self.policy.temperature
        with self.policy.autocast():
            return score_tokens(hidden, target, head, temperature=temperature, chunk=chunk)[0]

    @torch.no_grad()
    def _weights(
        self, hidden: Tensor, head: Head, packed: PaddedRows | SharedRows, places: Tensor, rows: Sequence[Row]
    ) -> Tensor:
        """[m], of the positions at `places`."""
        chunk, temperature = self.policy.logits_chunk, self.policy.temperature
        targets = packed.target[places]
        _, entropy = score_tokens(hidden, targets, head, temperature=temperature, entropy=True, chunk=chunk)
        has_hint = onto(hidden.device, torch.tensor([*(row.hint is not None for row in rows), False]))
        return (-self.entropy_sensitivity * entropy).exp() * has_hint[packed.place[places] // packed.shape[1]]

    def _with_hint(self, row: Row) -> Row:
        if row.hint is None:
            return row
        return replace(row, prompt=replace(row.prompt, token_ids=self.hinted(row.prompt, row.hint)))

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Context in eval mode (no dropout), independent of the policy's mode, with the teacher's weights in place."""
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            if self.following is not None and isinstance(self.following.copy, AdapterCopy):
                with self.following.copy.swapped():
                    yield
            else:
                yield
        finally:
            self.policy.model.train(was_training)


def share_of_text(
    packed: PaddedRows | SharedRows,
    aligned: Sequence[Aligned],
    logp: Sequence[Tensor],
    chosen: Sequence[int],
    share: float = 1.0,
) -> Share:
    """The share of log-probabilities [m_i] of a teacher's own tokens, at the policy's positions of the `chosen` rows."""
    total, span = over_policy(aligned, logp, torch.Size((len(chosen), packed.shape[1])))
    places, flat = places_of(packed, chosen)
    device = packed.place.device
    return Share(places.to(device), None, share, total.flatten()[flat].to(device), span=span.flatten()[flat].to(device))


def places_of(packed: PaddedRows | SharedRows, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions [m] of the tokens of the chosen rows, and their flat indices [m] into [len(chosen), T], on the host.

    A position that predicts nothing, of rows that are shared out over processes, is in no row.
    """
    place, (count, width) = packed.place.cpu(), packed.shape
    index = torch.full((count + 1,), -1, dtype=torch.long)
    index[torch.tensor(chosen)] = torch.arange(len(chosen))
    places = (index[place // width] >= 0).nonzero().squeeze(1)
    at = place[places]
    return places, index[at // width] * width + at % width


def _aligned(
    hidden: Tensor, mine: PaddedRows | SharedRows, packed: PaddedRows | SharedRows, chosen: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """`hidden` [m, D] of the chosen rows in the order of `packed`, and their positions [m] there."""
    device, width = hidden.device, packed.shape[1]
    rows = torch.arange(packed.shape[0], device=device) if chosen is None else onto(device, torch.tensor(chosen))
    flat = rows[mine.place // mine.shape[1]] * width + mine.place % mine.shape[1]
    index = torch.full((packed.shape[0] * width + 1,), -1, dtype=torch.long, device=device)  # the last: of no token
    index[flat] = torch.arange(len(flat), device=device)
    order = index[packed.place]
    places = (order >= 0).nonzero().squeeze(1)
    return hidden[order[places]], places


class Speaking(Protocol):
    """A teacher, in the process or served, that can be one of several."""

    @property
    def hints(self) -> Hints | None: ...

    @property
    def alignment(self) -> TextAlignment | None: ...

    @property
    def is_split(self) -> bool:
        """True if every process must make each of its passes, with rows of it or without."""

    def speak(
        self, packed: PaddedRows | SharedRows, rows: Sequence[Row], chosen: Sequence[int] | None, share: float
    ) -> tuple[Share, list[bool]]: ...


def signal_of(teacher: Speaking, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Signal:
    """The signal of a teacher that is alone."""
    share, informed = teacher.speak(packed, rows, None, 1.0)
    return Signal((share,), onto(packed.place.device, torch.tensor(informed)))


@dataclass(frozen=True, eq=False)
class Member:
    """One of several teachers: its share, and the value of the column `by` that it teaches; None: every prompt."""

    teacher: Speaking
    share: float = 1.0
    value: str | None = None


@dataclass(frozen=True, eq=False)
class Teachers:
    """Several teachers: each of the prompts whose column names it, or all of them averaged."""

    members: tuple[Member, ...]
    by: str | None = None

    @property
    def hints(self) -> Hints | None:
        return self.members[0].teacher.hints

    def at(self, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Signal:
        """The teachers at the policy's positions. A prompt whose column names none of them has no teacher."""
        shares: list[Share] = []
        is_informed = torch.zeros(len(rows), dtype=torch.bool)
        chosen_by = [[i for i, row in enumerate(rows) if m.value in (None, self._value(row))] for m in self.members]
        for place, (member, mine) in enumerate(zip(self.members, chosen_by, strict=True)):
            if not mine:
                if member.teacher.is_split or (place == 0 and not any(chosen_by)):
                    shares.insert(0, member.teacher.speak(packed, rows, [0], 0.0)[0])  # counts nothing
                continue
            chosen = None if len(mine) == len(rows) else mine
            share, informed = member.teacher.speak(packed, rows, chosen, member.share)
            is_informed[mine] = torch.tensor(informed)
            shares.append(share)
        if any(member.teacher.alignment is not None for member in self.members):
            each = lambda share: 1 + packed.place[share.places] % packed.shape[1]
            shares = [share if share.span is not None else replace(share, span=each(share)) for share in shares]
        return Signal(tuple(shares), is_informed.to(packed.place.device))

    def _value(self, row: Row) -> str | None:
        return None if self.by is None else str(row.prompt.columns.get(self.by))

    def follow(self, policy: Policy, report: StepReport) -> None:
        """Nothing: they are models of their own."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...
