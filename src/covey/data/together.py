"""One question in several languages: a row becomes one prompt a language, whose groups share one advantage baseline."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from covey.data.order import Order, Outcome, Row, pass_on
from covey.errors import DataError
from covey.types import Group

LANGUAGE = "language"


def question_of(uid: str) -> str:
    """Uid that the prompts of one question have in common: `0:17` of `0:17/de`."""
    return uid.partition("/")[0]


def columns_of(columns: Collection[str], languages: Sequence[str]) -> list[str]:
    """The columns that rewards see: `answer_de` is `answer`, and `language` names the language."""
    names = [_parted(column, languages)[0] for column in columns]
    return list(dict.fromkeys([*names, LANGUAGE]))


def refuse_missing_languages(columns: Collection[str] | None, languages: Sequence[str]) -> None:
    """Raise DataError unless each language has its column; one of them may be `prompt` itself. `columns` None: not told."""
    missing = [code for code in languages if f"prompt_{code}" not in (columns or ())]
    if columns is not None and len(missing) > 1:
        raise DataError(
            f"group_languages={list(languages)} needs a column of prompts for each language, but one at most (column prompt); "
            f"{', '.join(f'prompt_{code}' for code in missing)} are missing among {', '.join(columns)}."
        )


def _parted(column: str, languages: Sequence[str]) -> tuple[str, str | None]:
    """A column's name without its language, and that language, the longest that it ends with: `pt_br` rather than `br`; None without one."""
    ends = [code for code in languages if column.endswith(f"_{code}") and len(column) > len(code) + 1]
    language = max(ends, key=len, default=None)
    return (column, None) if language is None else (column.removesuffix(f"_{language}"), language)


class Together:
    """Another order, whose rows come once a language, one after the other; uids are `epoch:row/language`."""

    def __init__(self, base: Order, languages: Sequence[str]) -> None:
        self.base, self.languages = base, tuple(languages)
        self._before: Mapping[str, Any] = base.state_dict()
        """The base order's state before the row that is being asked."""
        self._current: tuple[str, Row] | None = None
        self._next = 0

    @property
    def num_rows(self) -> int | None:
        return self.base.num_rows

    def next(self) -> tuple[str, Row]:
        """The uid and the row in the next language: `prompt_de` as `prompt` and so on, without other languages' columns."""
        if self._current is None:
            self._before = self.base.state_dict()
            self._current, self._next = self.base.next(), 0
        uid, row = self._current
        language = self.languages[self._next]
        self._next += 1
        if self._next == len(self.languages):
            self._current = None
        parts = [(*_parted(name, self.languages), value) for name, value in row.items()]
        plain, translated = ({name: value for name, of, value in parts if of == end} for end in (None, language))
        return f"{uid}/{language}", {**plain, **translated, LANGUAGE: language}

    def learn(self, outcomes: Mapping[int, Outcome]) -> None:
        pass_on(self.base, "learn", outcomes)

    def commit(self, state: Mapping[str, Any]) -> None:
        pass_on(self.base, "commit", state["base"])

    def state_dict(self) -> dict[str, Any]:
        is_between = self._current is None
        return {
            "base": self.base.state_dict() if is_between else self._before,
            "asked": 0 if is_between else self._next,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self._current = None
        for _ in range(int(state["asked"])):
            self.next()


def questions(groups: Sequence[Group]) -> list[list[int]]:
    """Indices of the groups of each question, ordered by their first group."""
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(question_of(group.prompt.uid), []).append(place)
    return list(places.values())


def joined(groups: Sequence[Group]) -> Group:
    """Groups of one question merged into one, for advantages only; its prompt is the first group's."""
    if len(groups) == 1:
        return groups[0]
    rewards = [group.rewards for group in groups if group.rewards is not None]
    return Group(
        prompt=groups[0].prompt,
        completions=tuple(completion for group in groups for completion in group.completions),
        rewards=torch.cat(rewards) if len(rewards) == len(groups) else None,
    )
