"""Checks of prompts: number, lengths, duplicates, and overlap of held-out prompts with training prompts."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from covey.data import EngineLength
from covey.data.lengths import longest_prompt
from covey.data.media import MEDIA_COLUMNS, has_media
from covey.data.prompts import to_prompt
from covey.data.rendering import as_written
from covey.doctor.finding import Finding, failed, passed, warned
from covey.errors import CoveyError

AREA = "data"
ROWS = 2000
"""Rows that are read; a longer data set is judged by them."""


def data_findings(
    dataset: Any,
    held_out: Any,
    tokenizer: Any,
    args: Any,
    context: int | None,
    processor: Any = None,
    engine: EngineLength | None = None,
) -> Iterator[Finding]:
    """Findings on both data sets. `context`: the most tokens that the model has positions for; `processor`: of media."""
    rows = first_rows(dataset)
    if not rows:
        yield failed(AREA, "the data set has no rows.", "give a file with at least one prompt")
        return
    total = len(dataset) if hasattr(dataset, "__len__") else None
    columns = sorted(rows[0])
    yield passed(
        AREA, f"{'a stream' if total is None else f'{total:,} rows'} with the columns {', '.join(columns)}", rows=total
    )
    are_text_prompts = not any(map(has_media, rows))  # one question is asked of many images or sounds
    if are_text_prompts:
        yield repeats(rows)
    yield from empty_columns([{name: row[name] for name in row if name not in MEDIA_COLUMNS} for row in rows])
    yield lengths(rows, tokenizer, args, context, processor, dataset, engine)
    if held_out is not None and are_text_prompts:
        yield overlap(rows, first_rows(held_out))


def first_rows(dataset: Any) -> list[Mapping[str, Any]]:
    """The first rows, at most ROWS of them, their messages without the nulls that Arrow filled in."""
    count = min(ROWS, len(dataset)) if hasattr(dataset, "__len__") else ROWS
    rows = dataset.select(range(count)) if hasattr(dataset, "select") else dataset.take(count)
    return [as_written(row, getattr(dataset, "features", None)) for row in rows]


def repeats(rows: list[Mapping[str, Any]]) -> Finding:
    """WARN when more than a tenth of the prompts are there more than once."""
    extra = len(rows) - len({written(row["prompt"]) for row in rows})
    share = extra / len(rows)
    if share > 0.1:
        return warned(
            AREA,
            f"{extra} of {len(rows)} prompts are repetitions of another row.",
            "remove them, or the run learns these prompts by heart",
            repeated=share,
        )
    return passed(AREA, f"{len(rows) - extra} different prompts in the {len(rows)} rows looked at", repeated=share)


def empty_columns(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """WARN for a column that rewards receive and that is empty in some rows, or the same in all."""
    for name in sorted(set().union(*rows) - {"prompt"}):
        values = [row.get(name) for row in rows]
        missing = [
            i for i, value in enumerate(values) if value is None or (isinstance(value, str) and not value.strip())
        ]
        if missing:
            sentence = (
                f"column {name!r} is empty in {len(missing)} of {len(rows)} rows, the first of them row {missing[0]}."
            )
            yield warned(
                AREA,
                sentence,
                f"fill or remove these rows, if a reward reads {name!r}",
                column=name,
                empty=len(missing),
            )
        elif len(rows) > 3 and name in ("answer", "solution") and len({written(value) for value in values}) == 1:
            yield warned(
                AREA, f"column {name!r} has the same value in every row.", "check how the file was made", column=name
            )


def lengths(
    rows: list[Mapping[str, Any]],
    tokenizer: Any,
    args: Any,
    context: int | None,
    processor: Any = None,
    dataset: Any = None,
    engine: EngineLength | None = None,
) -> Finding:
    """The longest of `dataset`, whose first rows are `rows`. FAIL when a prompt cannot be encoded, or when prompts leave no room for a completion; WARN when such prompts are dropped."""
    template = args.chat_template_kwargs if isinstance(args.chat_template_kwargs, dict) else {}
    how = tokenizer, template, processor, getattr(dataset, "features", None)
    try:
        prompts = (to_prompt(row, str(i), f"row {i}", *how) for i, row in enumerate(rows))
        counts = [len(prompt.token_ids) for prompt in prompts]
        more = 0 if len(counts) < ROWS or processor is not None else longest_prompt(dataset, tokenizer, template)
    except CoveyError as error:
        return failed(AREA, str(error))
    longest, middle = max(*counts, more), sorted(counts)[len(counts) // 2]
    facts = {"longest": longest, "median": middle}
    room = None if context is None else context - args.max_completion_length
    is_engines = engine is not None and (room is None or engine.tokens - 1 < room)
    room = engine.tokens - 1 if engine is not None and is_engines else room
    over = [i for i, count in enumerate(counts) if room is not None and count > room]
    cut = [] if engine is None else [i for i, count in enumerate(counts) if engine.truncates_after(count)]
    if engine is not None and cut and not over:
        sentence = f"{len(cut)} of {len(rows)} prompts leave completions fewer than {args.max_completion_length} tokens"
        sentence += f" of {engine.option}, {engine.tokens}, the first of them row {cut[0]}."
        return warned(AREA, sentence, "raise that, or lower --max-completion-length", truncated=len(cut), **facts)
    if not over:
        shown = f"prompts of {middle} tokens (median) to {longest} (longest)"
        whole = room if engine is None or room is None else min(room, engine.tokens - args.max_completion_length)
        fits = "" if whole is None else f"; {whole} fit beside a completion of {args.max_completion_length}"
        return passed(AREA, shown + fits, **facts)
    limit = f"that {engine.option} leaves" if engine is not None and is_engines else "that fit beside a completion"
    sentence = f"{len(over)} of {len(rows)} prompts are longer than the {room} tokens {limit}, the first of them row {over[0]}."
    first = "raise that" if is_engines else "lower --max-completion-length"
    fix = f"{first}, shorten them, or leave them out with --on-long-prompt drop"
    if args.on_long_prompt == "drop" and len(over) < len(rows):
        return warned(AREA, sentence + " They are left out.", fix, too_long=len(over), **facts)
    return failed(AREA, sentence, fix, too_long=len(over), **facts)


def overlap(rows: list[Mapping[str, Any]], held_out: list[Mapping[str, Any]]) -> Finding:
    """WARN when prompts of the evaluation are trained on."""
    seen = {written(row["prompt"]) for row in rows}
    common = sum(written(row["prompt"]) in seen for row in held_out)
    if common:
        sentence = (
            f"{common} of {len(held_out)} held-out prompts are in the training data too, so evaluation would flatter."
        )
        return warned(AREA, sentence, "remove them from one of the two", overlap=common)
    return passed(AREA, f"none of the {len(held_out)} held-out prompts is in the training data looked at", overlap=0)


def written(value: Any) -> str:
    """A prompt or value as text that is the same for the same content."""
    return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
