"""Answers of an environment to rows that end by themselves: they go on, and the answer's tokens enter at once, as a prompt's do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from covey.errors import RAW_ERRORS
from covey.rollout.batches import AnswerBatch, DecodeBatch, PrefillBatch
from covey.rollout.environments import Answer, Environment, Turn, replies
from covey.rollout.forward import Forward, ModulesForward, plain_cache
from covey.rollout.kv_cache import KVCache, rounded
from covey.rollout.requests import LIMIT, OUTPUT_ROW, POSITION, SLOT, TOKEN, WRITTEN, RunningGroup
from covey.rollout.softmax_attention import HIDDEN
from covey.rollout.thinking import ThinkingBudget
from covey.types import Prompt

FEWEST, ENOUGH, BLOCK = 8, 64, 64

Answers = Mapping[int, Sequence[int]]
"""By row, the tokens that enter it."""


class Rows(Protocol):
    """The rows of a `Scheduler`, as far as answers enter them: its tables, which are written to, and what computes them."""

    environment: "Environment | None"
    tokenizer: Any
    barred: frozenset[int]
    forward: Forward
    prefill_tokens: int
    num_rows: int
    rows: Tensor
    live: Tensor
    tokens: Tensor
    logprobs: Tensor
    replies: Tensor | None
    experts: Tensor | None
    seen: Tensor | None
    open: dict[int, RunningGroup]
    expect_media: Callable[[Prompt], None]

    @property
    def cache(self) -> KVCache: ...


def answer_rows(scheduler: Rows, stops: Tensor) -> Tensor:
    """[R] bool, rows among `stops` that continue because the environment of this `Scheduler` replied; its tables hold the replies."""
    continues = torch.zeros_like(stops)
    ended = stops.nonzero().squeeze(-1).tolist()
    environment, table = scheduler.environment, scheduler.replies
    if isinstance(environment, ThinkingBudget) and table is not None:
        _close_thoughts(scheduler, environment, table, ~stops & scheduler.live[: len(stops)])
    if not ended or environment is None or table is None:
        return continues
    columns, answers = scheduler.rows[:, ended].T.tolist(), dict[int, Sequence[int]]()
    turns = [_turn(scheduler, column, table) for column in columns]
    replied = replies(environment, turns, scheduler.tokenizer, scheduler.barred)
    for row, column, reply in zip(ended, columns, replied, strict=True):
        if reply is None:
            continue
        cut = reply.cut(column[LIMIT] - column[WRITTEN], scheduler.barred)
        answer, end = cut.token_ids, column[WRITTEN] + len(cut.token_ids)
        table[column[OUTPUT_ROW], column[WRITTEN] : end] = torch.tensor(answer, dtype=torch.int64)
        continues[row] = True
        if len(answer) < len(reply.token_ids):
            scheduler.rows[LIMIT, row] = end
        if cut.media is not None:
            _enter_seen(scheduler, row, column, cut)
        elif len(answer) >= fewest_tokens(scheduler.forward, scheduler.num_rows):
            answers[row] = answer
    if answers and takes_answers(scheduler.forward):
        _enter_answers(scheduler, answers)
    return continues


def _close_thoughts(scheduler: Rows, budget: ThinkingBudget, table: Tensor, goes_on: Tensor) -> None:
    """Write the closing mark, as the next tokens, into the `table` of rows that go on and have just used up their budget in thoughts."""
    rows, closing = scheduler.rows[:, : scheduler.num_rows], budget.closing
    start = rows[WRITTEN] - budget.tokens
    behind_reply = (start > 0) & (table[rows[OUTPUT_ROW], (start - 1).clamp(min=0)] >= 0)
    for row in (((start == 0) | behind_reply) & goes_on & (rows[WRITTEN] < rows[LIMIT])).nonzero().flatten().tolist():
        column = rows[:, row].tolist()
        output_row, written, begin = column[OUTPUT_ROW], column[WRITTEN], column[WRITTEN] - budget.tokens
        ids = scheduler.tokens[output_row, :written].tolist()
        prompt = scheduler.open[column[SLOT]].request.prompt.token_ids
        is_one_turn = bool((table[output_row, begin : written + 1] < 0).all())
        if is_one_turn and budget.is_thinking([*prompt, *ids[:begin]], ids[begin:]):
            cut = torch.tensor(closing[: column[LIMIT] - written], dtype=torch.int64)
            table[output_row, written : written + len(cut)] = cut


def _enter_seen(scheduler: Rows, row: int, column: list[int], answer: Answer) -> None:
    """Prefill an answer with media: embedded in the row's whole conversation, which the model numbers by its media."""
    output_row = column[OUTPUT_ROW]
    whole = scheduler.open[column[SLOT]].answered(
        output_row, scheduler.tokens[output_row, : column[WRITTEN]].tolist(), answer
    )
    scheduler.expect_media(whole)
    position, experts = prefill_seen(scheduler.forward, scheduler.cache, row, whole, len(answer.token_ids))
    _place_answer(scheduler, row, column, answer.token_ids, experts)
    scheduler.rows[POSITION, row] = position


def _enter_answers(scheduler: Rows, answers: dict[int, Sequence[int]]) -> None:
    """Prefill the last drawn tokens of these rows and their answers but for the last tokens, which are the next inputs."""
    columns = {row: scheduler.rows[:, row].tolist() for row in answers}
    read = {row: [columns[row][TOKEN], *ids[:-1]] for row, ids in answers.items()}
    positions = {row: column[POSITION] for row, column in columns.items()}
    for row, experts in prefill_answers(scheduler.forward, scheduler.cache, read, positions, scheduler.prefill_tokens):
        _place_answer(scheduler, row, columns[row], answers[row], experts)


def _place_answer(scheduler: Rows, row: int, column: list[int], answer: Sequence[int], experts: Tensor | None) -> None:
    """Enter an answer that was prefilled into the tables."""
    ids = torch.tensor(answer, device=scheduler.rows.device)
    place = column[OUTPUT_ROW], slice(column[WRITTEN], column[WRITTEN] + len(ids))
    scheduler.tokens[place], scheduler.logprobs[place] = ids, 0.0
    if scheduler.experts is not None and experts is not None:
        scheduler.experts[place] = experts
    if scheduler.seen is not None:
        scheduler.seen[row, ids] = True
    scheduler.rows[TOKEN, row] = ids[-1]
    scheduler.rows[POSITION : WRITTEN + 1, row] += len(ids)


def _turn(scheduler: Rows, column: list[int], table: Tensor) -> Turn:
    group, output_row, written = scheduler.open[column[SLOT]], column[OUTPUT_ROW], column[WRITTEN]
    ids, sample = scheduler.tokens[output_row, :written].tolist(), group.output_rows.index(output_row)
    is_written = (table[output_row, :written] < 0).tolist()
    return Turn.of(group.request.prompt, sample, ids, is_written, scheduler.tokenizer)


def fewest_tokens(forward: Forward, rows: int) -> int:
    """Tokens of the shortest answer that is prefilled while `rows` rows are decoded; a shorter one rides along in their steps.

    A pass of its own costs about as much as a decode step of so many rows: on a CPU, 32 tokens take the same time both ways
    while 32 rows are decoded. Layers with a state compute blocks of 64 tokens, so that a shorter answer costs as much as a whole block.
    """
    return BLOCK if forward.states is not None else max(FEWEST, min(2 * rows, ENOUGH))


def prefill_answers(
    forward: Forward, cache: KVCache, answers: Answers, positions: Mapping[int, int], most: int
) -> Iterator[tuple[int, Tensor | None]]:
    """Prefill these tokens, in batches of at most `most` tokens or of one row. Yields each row, and the experts [L, L_r, k] of its tokens.

    `positions` are those of the rows' first tokens. Answers are padded to the longest of their batch; layers with a state get
    answers of one length, since a state would remember padding.
    """
    extend_rows(cache, list(answers), [len(ids) for ids in answers.values()])
    for rows in _batches(answers, most, is_padded=forward.states is None):
        lengths = [len(answers[row]) for row in rows]
        ids = torch.zeros(len(rows), _width(forward, cache, max(lengths)), dtype=torch.int64)  # [A, L]
        for a, row in enumerate(rows):
            ids[a, : lengths[a]] = torch.tensor(answers[row], dtype=torch.int64)
        at = torch.tensor([positions[row] for row in rows])[:, None] + torch.arange(ids.shape[1])
        at = at.clamp(max=torch.tensor([positions[row] + len(answers[row]) - 1 for row in rows])[:, None])
        forward.prefill(ids.to(forward.device), at.to(forward.device), AnswerBatch(cache, rows, lengths))
        experts = [None] * len(rows) if forward.routers is None else forward.routers.taken().chunk(len(rows))
        for row, length, chosen in zip(rows, lengths, experts, strict=True):
            yield row, None if chosen is None else chosen[:length]


def prefill_seen(forward: Forward, cache: KVCache, row: int, whole: Prompt, count: int) -> tuple[int, Tensor | None]:
    """Prefill the row's last `count` tokens before the last of `whole`, its conversation with media.

    Returns the position of that last token, which the media leave, and the experts [L, L_r, k] of the tokens.
    """
    assert isinstance(forward, ModulesForward)  # `DecoderForward` takes text only
    extend_rows(cache, [row], [count])
    position = forward.prefill_media(whole, AnswerBatch(cache, [row], [count]))
    return position, None if forward.routers is None else forward.routers.taken()


def extend_rows(cache: KVCache, rows: Sequence[int], counts: Sequence[int]) -> None:
    """Give each of `rows` columns for so many more keys, the last ones before the step column.

    A row's keys stay in one run of columns: its earlier keys move to the left, and all rows to the right where that takes room.
    """
    missing = max(count - cache.starts[row] for row, count in zip(rows, counts, strict=True))
    ahead = missing + min(cache.starts) if missing > 0 else 0
    if ahead:
        cache.resize(cache.num_rows, ahead)
        used = cache.step_column
        for x in (*cache.suffix, cache.suffix_bias[None, :, None, :, None]):
            x[:, :, :, ahead : ahead + used] = x[:, :, :, :used].clone()
        cache.suffix_bias[:, :ahead] = HIDDEN
    starts, now = [start + ahead for start in cache.starts], cache.step_column + ahead
    for row, count in zip(rows, counts, strict=True):
        start = starts[row]
        for buffer in cache.suffix:
            buffer[:, row, :, start - count : now - count] = buffer[:, row, :, start:now].clone()
        starts[row] -= count
        cache.suffix_bias[row, start - count : now] = 0.0
    cache.set_starts(starts, now)


def _batches(answers: Answers, most: int, is_padded: bool) -> Iterator[list[int]]:
    """Rows that are prefilled together, in the order of their lengths."""
    batch: list[int] = []
    for row in sorted(answers, key=lambda row: len(answers[row])):
        length = len(answers[row])
        if batch and (length * (len(batch) + 1) > most or not (is_padded or length == len(answers[batch[0]]))):
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _width(forward: Forward, cache: KVCache, longest: int) -> int:
    """Tokens of a padded answer: few sizes occur where padding does no harm."""
    return longest if forward.states is not None else min(rounded(longest), cache.context)


_takes_answers: WeakKeyDictionary[Forward, bool] = WeakKeyDictionary()


def takes_answers(forward: Forward) -> bool:
    """True if answers can be prefilled. Layers with a state are tried once: some begin anew with every sequence."""
    if forward.states is None:
        return not forward.is_indexed  # indexers choose from the keys of prompts and of decode steps
    if forward not in _takes_answers:
        with forward.evaluating():
            try:
                _takes_answers[forward] = _continues_exactly(forward)
            except RAW_ERRORS:
                _takes_answers[forward] = False
    return _takes_answers[forward]


def _continues_exactly(forward: Forward) -> bool:
    """True if a prefill from states gives the logits of decode steps, for answers shorter and longer than a convolution.

    Measured over 19 kinds: 2e-3 at most where it does in float32 and 3e-2 in 16 bits; otherwise 0.2 and more. In 16 bits a router
    may choose another expert by rounding, so the median of the rows counts.
    """
    for length in (2, 9):
        mine, plain = (_next_logits(forward, length, is_prefilled=is_prefilled) for is_prefilled in (True, False))
        gaps = (mine - plain).norm(dim=-1) / (plain - plain.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-6)
        if not (float(gaps.max()) <= 1e-2 if forward.dtype == torch.float32 else float(gaps.median()) <= 4e-2):
            return False
    return True


def _next_logits(forward: Forward, count: int, *, is_prefilled: bool) -> Tensor:
    """[3, V] logits after an answer of `count` tokens to each of three rows, prefilled or fed by decode steps.

    Noise is added to all states before, so that a layer that does not read its own is seen.
    """
    random = torch.Generator().manual_seed(count)
    ids = torch.randint(3, forward.vocab_size, (3, 4 + count), generator=random)
    cache, stop = plain_cache(forward, ids.shape[1] + 1), ids.shape[1] - 1
    place = lambda start, stop: torch.arange(start, stop, device=forward.device).expand(3, -1)
    slots = cache.add_prompts([3] * 3)
    forward.prefill(ids[:, :3].to(forward.device), place(0, 3), PrefillBatch(cache, slots))
    cache.add_rows(3)
    cache.begin_rows([0, 1, 2])
    cache.set_row_owners([0, 1, 2])
    for state in [] if cache.states is None else cache.states.tensors:
        state += torch.randn(state.shape, generator=random).to(state)
    if is_prefilled:
        answers = {row: ids[row, 3:stop].tolist() for row in range(3)}
        list(prefill_answers(forward, cache, answers, dict.fromkeys(answers, 3), 2 * (count + 1)))
    for at in range(stop if is_prefilled else 3, stop + 1):
        cache.begin_step()
        step = ids[:, at].to(forward.device)
        out = forward.decode(_padded(step, cache), _padded(place(at, at + 1)[:, 0], cache), DecodeBatch(cache))
        cache.end_step()
    return out[:3].float()


def _padded(x: Tensor, cache: KVCache) -> Tensor:
    return torch.nn.functional.pad(x, (0, cache.num_computed - len(x)))
