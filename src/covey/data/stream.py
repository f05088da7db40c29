"""Prompts in an order that a seed decides, from a position that a checkpoint remembers."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import datasets

from covey.data.checks import first_prompts, row_at, row_of
from covey.data.curriculum import order_of
from covey.data.live.dataset import LiveDataset
from covey.data.media import MEDIA_COLUMNS, expect_files, has_media, media_digest
from covey.data.order import Order, Outcome, pass_on
from covey.data.prompts import to_prompt
from covey.data.together import Together, question_of
from covey.data.tokenizer import expect_ids_below, tokens_beyond
from covey.declared import Count, checked
from covey.errors import DataError
from covey.types import Prompt

logger = logging.getLogger(__name__)

_FIRST_CHECK_ROWS = 100_000
"""Most rows whose prompt lengths are checked before training; further rows are checked when they are drawn."""
_EXAMPLE_ROWS = 1000
"""Rows of which one with media is looked for."""


@dataclass(frozen=True)
class EngineLength:
    """Context length of an engine that writes completions, where it is less than the model's."""

    tokens: int
    """Prompt and completion together."""
    max_completion_length: int
    option: str
    """Such as `the vLLM server's --max-model-len`."""

    def truncates_after(self, prompt_length: int) -> bool:
        """True if a completion of this prompt reaches the engine's length before its own."""
        return prompt_length + self.max_completion_length > self.tokens


class PromptStream:
    """The prompts of a data set without end: each row once an epoch, then the next epoch in a new order.

    `take` gives the same prompts in every process; a process shares them out itself. The first epoch's order is that of
    TRL's `RepeatSampler` with the same seed, and a streamed data set is shuffled in blocks of `block_size` rows. `curriculum`
    chooses another order, see `covey.data.curriculum`; with `languages` each row comes once a language, see `Together`. A prompt of
    more than `max_prompt_length` tokens raises DataError (those of the first 100,000 rows already here), or is left out
    and counted with `on_too_long="drop"`; it is never cut.
    """

    @checked
    def __init__(
        self,
        dataset: Iterable[Any] | None,
        tokenizer: Any,
        *,
        processor: Any = None,
        seed: int = 42,
        shuffle: bool = True,
        curriculum: str = "none",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_length: int | None = None,
        on_too_long: Literal["error", "drop"] = "error",
        block_size: Count = 1000,
        num_embeddings: int | None = None,
        name: str = "the data set",
        languages: Sequence[str] = (),
        keeps_shares: bool = True,
        engine: EngineLength | None = None,
    ) -> None:
        """`keeps_shares`: draw the sets of a mixture by their weights; False, to evaluate: each row comes once.

        `engine`: a prompt that leaves it no token is too long too. One that leaves it fewer than a completion may have is warned of once.
        """
        self.tokenizer, self.processor = tokenizer, processor
        self.template = dict(chat_template_kwargs or {})
        self.max_prompt_length = max_prompt_length
        self.on_too_long = on_too_long
        self.num_embeddings = num_embeddings
        self.engine, self.has_warned = engine, False
        self.name = name
        self.num_dropped = 0
        self._dataset: Any = dataset
        self._seed, self._shuffle, self._curriculum = seed, shuffle, curriculum
        self._order: Order = order_of(
            dataset, curriculum=curriculum, seed=seed, shuffle=shuffle, block_size=block_size, keeps_shares=keeps_shares
        )
        if languages:
            self._order = Together(self._order, languages)
        if max_prompt_length is not None and max_prompt_length < 1:
            raise DataError(
                f"No room for a prompt: max_completion_length takes the whole context and leaves {max_prompt_length} tokens; lower it."
            )
        if engine is not None:
            self.max_prompt_length = min(engine.tokens - 1, self.max_prompt_length or engine.tokens)
        if hasattr(dataset, "__len__"):
            self._check_rows()

    @property
    def num_rows(self) -> int | None:
        """Rows an epoch; `None` for a streamed data set."""
        return self._order.num_rows

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts, over the end of the epoch where need be. An empty stream raises DataError."""
        taken: list[Prompt] = []
        dropped_in_a_row = 0
        while len(taken) < n:
            uid, row = self._order.next()
            prompt = self._prompt(uid, row)
            if prompt is not None:
                taken.append(prompt)
                dropped_in_a_row = 0
                continue
            dropped_in_a_row += 1
            if dropped_in_a_row >= 2 * (self.num_rows or _FIRST_CHECK_ROWS):  # the last of an epoch, the next's first
                raise DataError(
                    f"Every prompt of {self.name} is longer than the {self.max_prompt_length} tokens that fit; nothing is left to train on."
                )
        return taken

    def take_rows(self, n: int) -> list[Prompt]:
        """The prompts of the next `n` rows, fewer where some are too long and left out."""
        rows = (self._order.next() for _ in range(n))
        return [prompt for uid, row in rows if (prompt := self._prompt(uid, row)) is not None]

    def first_with_media(self) -> Prompt | None:
        """The first prompt with an image, a sound or a video, out of the first rows; the stream stays where it is."""
        if self.processor is None or isinstance(self._dataset, LiveDataset):
            return None
        dropped = self.num_dropped
        rows = enumerate(islice(self._dataset, _EXAMPLE_ROWS))
        seen = (self._prompt(f"example:{i}", row) for i, row in rows if has_media(row))
        example = next((prompt for prompt in seen if prompt is not None), None)
        self.num_dropped = dropped
        return example

    def again(self, prompt: Prompt) -> Prompt:
        """The prompt of this uid with every column of its row, where rows have numbers; else as it is."""
        row = prompt.uid.partition(":")[2]
        if self.num_rows is None or not row.isdigit():
            return prompt
        return self._prompt(prompt.uid, row_at(self._dataset, int(row), self.name)) or prompt

    def learn(self, outcomes: Mapping[str, Outcome]) -> None:
        """Report the outcomes of prompts, by their uid, to the order; a static order ignores them."""
        by_row: dict[int, list[Outcome]] = {}
        for uid, outcome in outcomes.items() if hasattr(self._order, "learn") else ():
            by_row.setdefault(int(question_of(uid).partition(":")[2]), []).append(outcome)
        pass_on(self._order, "learn", {row: Outcome.mean(several) for row, several in by_row.items()})

    def commit(self, state: Mapping[str, Any]) -> None:
        """A checkpoint with this state is on the disk: a live source may forget the rows before it."""
        if state:
            pass_on(self._order, "commit", state["order"])

    def state_dict(self) -> dict[str, Any]:
        """The exact position, as plain values that JSON can hold."""
        fingerprint, other_columns = self._digests
        return {
            "order": self._order.state_dict(),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "curriculum": self._curriculum,
            "dropped": self.num_dropped,
            "fingerprint": fingerprint,
            "other_columns": other_columns,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when the data or its order is not the one it was taken from."""
        now = {"seed": self._seed, "shuffle": self._shuffle, "curriculum": self._curriculum}
        for name, value in now.items():
            if state.get(name, "none") != value:
                raise DataError(
                    f"The checkpoint drew its prompts with {name}={state.get(name, 'none')!r} and this run has {value!r}; resume with the same, "
                    "or start a new run from the checkpoint's model."
                )
        fingerprint, other_columns = self._digests
        if state["fingerprint"] != fingerprint:
            raise DataError(
                f"{self.name} is not the one of the checkpoint (other rows or columns), so its position means nothing; restore it, "
                "or start a new run from the checkpoint's model."
            )
        if state.get("other_columns", other_columns) != other_columns:
            logger.warning(
                "%s has the prompts of the checkpoint, but not its other columns, such as answers or the weights of a mixture; "
                "the run goes on with today's.",
                self.name,
            )
        self.num_dropped = state["dropped"]
        self._order.load_state_dict(state["order"])

    def _prompt(self, uid: str, row: Mapping[str, Any]) -> Prompt | None:
        """The row as a prompt, or None when it is too long and may be dropped."""
        where = row_of(uid.partition(":")[2], self.name)
        features = getattr(self._dataset, "features", None)
        prompt = to_prompt(row, uid, where, self.tokenizer, self.template, self.processor, features)
        length, limit = len(prompt.token_ids), self.max_prompt_length
        if not length:
            raise DataError(f"{where} has a prompt without a single token; remove the row.")
        expect_ids_below(prompt.token_ids, self.num_embeddings, f"{where}: its prompt")
        if limit is None or length <= limit:
            self._expect_whole(where, length)
            return prompt
        if self.on_too_long == "error":
            why = f"but only {limit} fit beside the completion in the model's context; shorten it, lower max_completion_length"
            if self.engine is not None and limit == self.engine.tokens - 1:
                why = f"and {self.engine.option} is {self.engine.tokens}; shorten it, raise that"
            raise DataError(
                f"{where} has a prompt of {length} tokens, {why}, or leave such rows out with on_long_prompt='drop'."
            )
        if not self.num_dropped:
            sentence = "%s has a prompt of %d tokens where %d fit; such prompts are left out and counted."
            logger.warning(sentence, where, length, limit)
        self.num_dropped += 1
        return None

    def _expect_whole(self, where: str, length: int) -> None:
        """Warn at the first prompt whose completions the engine truncates before `max_completion_length`."""
        if self.has_warned or self.engine is None or not self.engine.truncates_after(length):
            return
        self.has_warned = True
        sentence = "%s has a prompt of %d tokens, and %s is %d: completions of such prompts end before max_completion_length=%d "
        words = where, length, self.engine.option, self.engine.tokens, self.engine.max_completion_length
        logger.warning(sentence + "and count as truncated.", *words)

    def _check_rows(self) -> None:
        """Encode the rows that could be too long, or hold an id without embedding, before any work is spent.

        Of rows with images, sounds or videos only the first is: the others are measured when they are drawn, for each takes its time.
        The files that the others name are looked for.
        """
        count = min(len(self._dataset), _FIRST_CHECK_ROWS)
        if set(MEDIA_COLUMNS) & set(getattr(self._dataset, "column_names", None) or ()) and count:
            self._prompt("0:0", row_at(self._dataset, 0, self.name))
            if isinstance(self._dataset, datasets.Dataset):
                expect_files(self._dataset, count, lambda index: row_of(index, self.name))
        limit = self.max_prompt_length if self.on_too_long == "error" else None
        beyond, engine = tokens_beyond(self.tokenizer, self.num_embeddings), self.engine
        if limit is None and not beyond and engine is None:
            return
        template = str(self.template)
        for index, (prompt, options) in enumerate(first_prompts(self._dataset, count, self.name)):
            most = _most_tokens(prompt, f"{template}{options}")
            is_long = limit is not None and most > limit
            may_truncate = engine is not None and not self.has_warned and engine.truncates_after(most)
            if is_long or may_truncate or any(token in f"{prompt} {options}" for token in beyond):
                self._prompt(f"0:{index}", row_at(self._dataset, index, self.name))
        self.num_dropped = 0  # rows count when they are drawn

    @cached_property
    def _digests(self) -> tuple[str, str | None]:
        """Of up to 16 rows at equal distances: the prompts and media, with the number of rows and the columns; and the other columns.

        No position depends on the other columns. Of a live source, whose rows are still to come: its name, and None.
        """
        if isinstance(self._dataset, LiveDataset):
            return _digest(self._dataset.name), None
        num_rows = self.num_rows or 0
        texts = [str(self.num_rows), str(sorted(getattr(self._dataset, "column_names", None) or []))]
        rest = []
        for index in sorted({num_rows * part // 16 for part in range(16)} if num_rows else ()):
            row = row_at(self._dataset, index, self.name)
            texts.append(str(_without_addresses(row.get("prompt"))))
            texts += [media_digest(row[name]) for name in MEDIA_COLUMNS if row.get(name) is not None]
            rest.append({name: value for name, value in row.items() if name not in ("prompt", *MEDIA_COLUMNS)})
        others = json.dumps(rest, default=lambda value: type(value).__name__, sort_keys=True)
        return _digest("\0".join(texts)), _digest(others)


def take(prompts: PromptStream, n: int, set_aside: Sequence[str]) -> list[Prompt]:
    """The next `n` prompts that are not set aside (excluded after bad numbers). Raises DataError when none is left."""
    if not set_aside:
        return prompts.take(n)
    refused, taken = frozenset(set_aside), list[Prompt]()
    misses = 0
    while len(taken) < n:
        prompt = prompts.take(1)[0]
        misses = misses + 1 if row_key(prompt) in refused else 0
        if not misses:
            taken.append(prompt)
        elif misses >= (prompts.num_rows or _FIRST_CHECK_ROWS):
            raise DataError("Every prompt of the data set has led to bad numbers and is set aside; look at bad_steps/.")
    return taken


def row_key(prompt: Prompt) -> str:
    """Key of a prompt's row in the data set, independent of the epoch."""
    return prompt.uid.partition(":")[2] or prompt.uid


def longer_prompt(
    dataset: Any, tokenizer: Any, tokens: int, template: Mapping[str, Any] | None = None, processor: Any = None
) -> int | None:
    """Length of the first prompt of more than `tokens`, of the first 100,000 rows; None without one, and for a streamed data set.

    Of rows with images, sounds or videos the first and those of long texts are measured.
    """
    if not hasattr(dataset, "__len__"):
        return None
    options, name, features = dict(template or {}), "the data set", getattr(dataset, "features", None)
    shown = str(options)
    has_files = bool(set(MEDIA_COLUMNS) & set(getattr(dataset, "column_names", None) or ()))
    rows = first_prompts(dataset, min(len(dataset), _FIRST_CHECK_ROWS), name)
    for index, (prompt, more) in enumerate(rows):
        if _most_tokens(prompt, f"{shown}{more}") > tokens or (has_files and not index):
            row = row_at(dataset, index, name)
            encoded = to_prompt(row, f"0:{index}", row_of(index, name), tokenizer, options, processor, features)
            if len(encoded.token_ids) > tokens:
                return len(encoded.token_ids)
    return None


def _without_addresses(value: Any) -> Any:
    """The messages with the images and decoders in their parts by content: each process has another `repr` of these."""
    if isinstance(value, Mapping):
        return {name: _without_addresses(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_addresses(part) for part in value]
    if hasattr(value, "metadata"):  # a decoder of torchcodec
        return str(value.metadata)
    return media_digest(value) if hasattr(value, "tobytes") else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _most_tokens(value: Any, template: str) -> int:
    """No fewer than the prompt's tokens, without a tokenizer: a token is at least one byte, a template adds some text and its options' tools."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass")) + 2
    return len(f"{value}{template}".encode("utf-8", "surrogatepass")) + 1000
