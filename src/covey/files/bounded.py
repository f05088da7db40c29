"""Untrusted text, YAML and JSON, read within bounds: of bytes, of nesting, of aliases, and of time."""

import json
import math
import os
import re
import select
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from covey.errors import ConfigError, CoveyError

MOST_BYTES = 4 << 20
"""Most bytes of an options or configuration file."""
LONGEST_LINE = 64 << 20
"""Bytes of one line of JSON lines."""
MOST_DEPTH = 60
MOST_NODES = 100_000
"""Values of a YAML text, each counted as often as an alias repeats it."""
_PATIENCE_SECONDS = 10.0
"""Longest silence of a pipe."""
_ODD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
"""Numbers in base 8 and 60 of YAML 1.1."""
_NO_BRACKETS_OR_QUOTES = bytes({*range(256)} - {*b'[]{}"'})


def read_bytes(
    path: str | Path,
    most: int = MOST_BYTES,
    error: type[CoveyError] = ConfigError,
    *,
    advice: str = "so it is not what is wanted here",
) -> bytes:
    """The content of a file or a pipe. Raises `error` for one that is longer than `most` (with `advice`), silent, or cannot be read."""
    try:
        # a pipe without a writer ends at once
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError, RuntimeError) as why:
        raise error(f"{path} cannot be read: {getattr(why, 'strerror', None) or why}.") from why
    parts, size = [], 0
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise error(f"{path} is a folder, where a file is wanted.")
        for part in _parts(descriptor):
            parts.append(part)
            size += len(part)
            if size > most:
                raise error(f"{path} is longer than {most >> 20} MiB, {advice}.")
    except TimeoutError as why:
        raise error(f"{path} says nothing for {_PATIENCE_SECONDS:.0f} seconds; give a file.") from why
    except OSError as why:
        raise error(f"{path} cannot be read: {why.strerror or why}.") from why
    finally:
        os.close(descriptor)
    return b"".join(parts)


def _parts(descriptor: int) -> Iterator[bytes]:
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        if not readable:
            raise TimeoutError
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            continue
        if not part:
            return
        until = time.monotonic() + _PATIENCE_SECONDS
        yield part


def read_text(path: str | Path, most: int = MOST_BYTES, error: type[CoveyError] = ConfigError) -> str:
    """Text of a file in UTF-8; otherwise as `read_bytes`."""
    try:
        return read_bytes(path, most, error).decode("utf-8-sig")
    except UnicodeDecodeError as why:
        raise error(f"{path} is not text in UTF-8 (byte {why.start}); save it as such.") from why


def yaml_of(text: str, source: str) -> tuple[Any, Any]:
    """The node and the value of a YAML text. Raises ConfigError, which begins with `source`, for what is not YAML or out of bounds."""
    import yaml

    try:
        _refuse_deep_yaml(text, source)
        refuse_odd_numbers(text, source)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _size(node, {}) > MOST_NODES:
            raise ConfigError(
                f"{source} holds more than {MOST_NODES:,} values, aliases counted; no options are so many."
            )
        return node, yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        raise ConfigError(f"{source}{line} is not YAML: {getattr(error, 'problem', None) or error}.") from error
    except ConfigError:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:  # a date that is none, and the like
        raise ConfigError(f"{source} holds a value that YAML cannot mean: {error}.") from error


def _refuse_deep_yaml(text: str, source: str) -> None:
    """Raise ConfigError before a parser that calls itself, or that looks at every open bracket, meets too many of them."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MOST_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark is not None else 1
            raise ConfigError(f"{source}, line {line} is nested more than {MOST_DEPTH} deep.")


def refuse_odd_numbers(text: str, source: str) -> None:
    """Raise ConfigError for numbers that YAML does not read as written: `010` is 8 there, and `1:30` is 90. A text that is no YAML has none."""
    import yaml

    with suppress(yaml.YAMLError):  # JSON may be indented by tabs, at which YAML's scanner stops
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.ScalarToken) and token.plain and _ODD_NUMBER.fullmatch(token.value):
                value = yaml.safe_load(token.value)
                if str(value) != token.value.lstrip("+0_"):
                    read = f"{token.value} is {value} in YAML"
                    raise ConfigError(f"{source}: {read}; write the number that is meant, or text in quotes.")


def _size(node: Any, sizes: dict[int, float]) -> float:
    """Values below a node, those that an alias repeats counted each time; infinite where it holds itself."""
    if id(node) in sizes:
        return sizes[id(node)]
    if not isinstance(node.value, list):
        return 1
    sizes[id(node)] = float("inf")
    parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
    sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]


def read_json(path: str | Path, error: type[CoveyError] = ConfigError) -> Any:
    """The content of a small JSON file. Raises `error` for one that is no JSON, or out of bounds."""
    content = read_bytes(path, error=error)
    if json_depth(content) > MOST_DEPTH:
        raise error(f"{path} is nested more than {MOST_DEPTH} deep.")
    try:
        return json.loads(content)
    except ValueError as why:
        raise error(f"{path} is not JSON: {why}.") from why


def finite(value: Any) -> Any:
    """A JSON value whose NaN and infinities, for which JSON has no word, are null."""
    if isinstance(value, dict):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def whole_characters(text: str) -> str:
    """The text with the character that each pair of surrogates stands for, and U+FFFD for half of one, which no file or tokenizer takes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def json_depth(content: bytes) -> int:
    """Depth of the nested brackets of a JSON text."""
    if content.count(b"[") + content.count(b"{") <= MOST_DEPTH:
        return 0
    unescaped = re.sub(rb"(?s)\\.", b"", content) if b"\\" in content else content
    marks = unescaped.translate(None, _NO_BRACKETS_OR_QUOTES)
    outside = b"".join(marks.split(b'"')[::2])  # of strings
    return max(accumulate(((mark in b"[{") - (mark in b"]}") for mark in outside), initial=0))
