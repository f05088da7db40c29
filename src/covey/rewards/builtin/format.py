"""Rewards for the shape of a text: a pattern, tags in order, JSON that satisfies a schema."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from covey.declared import Count, checked_dataclass
from covey.errors import ConfigError, RewardError, needed
from covey.rewards.builtin.text import text_of

_DEEPEST = 200
"""Nested brackets beyond which a text counts as no JSON: parsers recurse, and a model can write a million brackets."""


@checked_dataclass(frozen=True)
class Pattern:
    """1.0 where the regular expression is found, 0.0 elsewhere.

    `match="all"` wants the whole text to match (spaces at both ends left out), `"start"` and `"end"` its beginning or end,
    `"anywhere"` any part. `.` matches line breaks too. A pattern whose time grows without bound on long texts is ended by
    the reward's time limit, not here; `max_characters` bounds the input, and a longer text scores 0.
    """

    pattern: str
    match: Literal["all", "start", "end", "anywhere"] = "all"
    ignore_case: bool = False
    max_characters: Count = 100_000
    __name__ = "pattern"

    def __post_init__(self) -> None:
        if self.match not in ("all", "start", "end", "anywhere"):
            raise ConfigError(f"pattern(match={self.match!r}): use 'all', 'start', 'end' or 'anywhere'.")
        try:
            self._compiled  # noqa: B018 - compiles it, and says now what is wrong
        except re.error as error:
            raise ConfigError(f"pattern({self.pattern!r}) is no regular expression: {error}.") from error

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        body = f"(?:{self.pattern})" + (r"\Z" if self.match == "end" else "")
        return re.compile(body, re.DOTALL | (re.IGNORECASE if self.ignore_case else 0))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        find = {"all": self._compiled.fullmatch, "start": self._compiled.match}.get(self.match, self._compiled.search)
        texts = [text_of(completion).strip() for completion in completions]
        return [float(len(text) <= self.max_characters and find(text) is not None) for text in texts]


@checked_dataclass(frozen=True)
class Tags:
    """1.0 where the text is `<a>...</a><b>...</b>` for the named tags, each once, in order, none empty; 0.0 elsewhere.

    Only spaces may stand before, between and after. With `partial=True` the score is the share of the 2 * n tags that occur
    exactly once and stand after those before them, as a slope towards the full shape; text around them is then allowed.
    """

    names: Sequence[str] = ("think", "answer")
    partial: bool = False
    __name__ = "tags"

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not self.names or not all(re.fullmatch(r"[\w\-]+", n) for n in self.names):
            raise ConfigError(f"tags(names={self.names!r}): give a list of tag names, such as ['think', 'answer'].")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"tags(names={list(self.names)!r}) names a tag twice; each may occur once.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        score = self._share if self.partial else self._is_whole
        return [float(score(text_of(completion))) for completion in completions]

    @property
    def _marks(self) -> list[str]:
        return [mark for name in self.names for mark in (f"<{name}>", f"</{name}>")]

    def _is_whole(self, text: str) -> bool:
        if any(text.count(mark) != 1 for mark in self._marks):
            return False
        rest = text
        for name in self.names:
            before, _, rest = rest.partition(f"<{name}>")
            inside, closing, rest = rest.partition(f"</{name}>")
            if before.strip() or not closing or not inside.strip():
                return False
        return not rest.strip()

    def _share(self, text: str) -> float:
        place, count = -1, 0
        for mark in self._marks:
            if text.count(mark) == 1 and text.index(mark) > place:
                place, count = text.index(mark), count + 1
        return count / len(self._marks)


@checked_dataclass(frozen=True)
class JsonSchema:
    """1.0 where the text is one JSON value that satisfies a JSON schema, 0.0 elsewhere.

    `schema` is a mapping or a path of a JSON file; without it, the column `schema` holds each prompt's own (a mapping or
    JSON text; `None` abstains). In a mapping of a column, a null is a field that other rows have, which the table filled in.
    The text may stand in one code fence when `fenced` is true, and nothing may stand around it. `NaN`, `Infinity` and a key that occurs twice are no JSON. References to other files or addresses are not followed.
    Needs jsonschema (`pip install 'covey[rewards]'`).
    """

    schema: Any = None
    fenced: bool = True
    _validators: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    __name__ = "json_schema"

    def __post_init__(self) -> None:
        if self.schema is not None:
            self._validator(self.schema)

    @property
    def needs_one_of(self) -> tuple[str, ...]:
        return ("schema",) if self.schema is None else ()

    def __call__(
        self, completions: Sequence[Any], schema: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        schemas = [self.schema] * len(completions) if self.schema is not None else schema
        if schemas is None:
            raise RewardError("json_schema needs a schema: json_schema(schema='file.json'), or a column 'schema'.")
        return [self._score(text_of(c), row_schema) for c, row_schema in zip(completions, schemas, strict=True)]

    def _score(self, text: str, schema: Any) -> float | None:
        if schema is None:
            return None
        schema = _without_nulls(schema) if self.schema is None else schema
        is_read, value = read_json(_strip_fence(text.strip()) if self.fenced else text)
        return float(is_read and _satisfies(self._validator(schema), value))

    def _validator(self, schema: Any) -> Any:
        key = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
        if key not in self._validators:
            self._validators[key] = _validator_of(_schema(schema))
        return self._validators[key]


def _without_nulls(schema: Any) -> Any:
    """The schema without the fields that are null; `const: null` would admit nothing else. The values of lists stay."""
    if isinstance(schema, Mapping):
        return {name: _without_nulls(value) for name, value in schema.items() if value is not None}
    return [_without_nulls(value) for value in schema] if isinstance(schema, list) else schema


def _strip_fence(text: str) -> str:
    """Inside of the one code fence around a text, or the text."""
    first, line_break, rest = text.partition("\n")
    is_fenced = first.rstrip(" \t") in ("```", "```json", "```JSON") and line_break and rest.endswith("```")
    return rest[:-3] if is_fenced else text


def _satisfies(validator: Any, value: Any) -> bool:
    """True if a value is valid; a schema that refers to itself without end counts as not satisfied."""
    try:
        return bool(validator.is_valid(value))
    except RecursionError:
        return False


def read_json(text: str) -> tuple[bool, Any]:
    """(True if the whole text is strict JSON, its value).

    >>> read_json('{"a": 1}'), read_json('{"a": 1} so'), read_json("NaN")
    ((True, {'a': 1}), (False, None), (False, None))
    """
    if _depth(text) > _DEEPEST:
        return False, None
    try:
        return True, json.loads(text, parse_constant=_refuse, object_pairs_hook=once)
    except (ValueError, RecursionError):
        return False, None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    return deepest


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of these pairs. Raises ValueError for a key that occurs twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _schema(schema: Any) -> Any:
    """The schema itself, out of a mapping, a boolean, JSON text or a file."""
    if isinstance(schema, Mapping | bool):
        return schema
    text = str(schema)
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).expanduser().read_text(encoding="utf-8")
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"json_schema: {str(schema)[:200]!r} is neither JSON nor a JSON file: {error}.") from error


def _validator_of(schema: Any) -> Any:
    with needed("json_schema needs jsonschema", "rewards"):
        import jsonschema
        from referencing import Registry
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise ConfigError(f"json_schema: the schema is not valid: {error.message}.") from error
    return kind(schema, registry=Registry())
