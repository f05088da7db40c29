"""Values between the code under test and the tests' process: JSON with tags, so that reading one can run nothing.

Plain values travel by value: numbers, text, bytes, lists, tuples, sets, dictionaries, ranges, decimals, fractions, dates, and
what the standard containers hold; a named tuple is a tuple, a member of an IntEnum an integer. An object whose class brings
an operator of its own, and what is no builtin at all, stays where it is and travels as a reference. Standard library only.
"""

import collections
import datetime
import decimal
import enum
import fractions
import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 32 * 2**20
"""Bytes of one message; a longer one ends the connection."""

_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "l": list, "t": tuple, "s": set, "f": frozenset, "q": collections.deque, "k": lambda keys: dict.fromkeys(keys).keys(),
}  # fmt: skip
_TAGS: dict[Any, str] = {**{made: tag for tag, made in _SEQUENCES.items()}, type({}.keys()): "k"}
_DICTS: dict[Any, str] = {
    dict: "d",
    collections.OrderedDict: "o",
    collections.defaultdict: "d",
    collections.Counter: "n",
}
_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range)
}
_TIMES: dict[str, Any] = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}
_JSON = frozenset((int, float, bool, str, type(None)))
_OF_BASE: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__, float: float.__pos__, str: str.__str__, bytes: lambda value: b"".join([value]),
    list: lambda value: [*list.__iter__(value)], tuple: lambda value: (*tuple.__iter__(value),),
    dict: lambda value: {key: value for key, value in dict.items(value)},  # noqa: C416 - dict(value) asks its methods
    set: lambda value: {*set.__iter__(value)}, frozenset: lambda value: frozenset([*frozenset.__iter__(value)]),
}  # fmt: skip
"""Conversion by base class: the exact value of an object of a subclass."""
_SILENT = frozenset(
    [
        "new", "init", "init_subclass", "repr", "str", "format", "doc", "module", "dict", "weakref", "slots",
        "annotations", "getattr", "getattribute", "setattr", "delattr", "reduce", "reduce_ex", "getnewargs",
        "getnewargs_ex", "getstate", "setstate", "copy", "deepcopy", "sizeof", "dir", "qualname", "match_args",
        "class_getitem", "set_name", "del", "class", "orig_bases", "parameters", "subclasshook", "static_attributes",
        "firstlineno", "annotate", "annotations_cache", "annotate_func", "call", "enter", "exit", "missing",
        "replace", "setitem", "delitem", "post_init", "type_params",
    ]
)  # fmt: skip
"""Special methods that no operator, comparison or builtin function asks."""
_ENUMS = frozenset((enum.Enum, enum.IntEnum, getattr(enum, "StrEnum", enum.Enum), getattr(enum, "ReprEnum", enum.Enum)))


class Broken(Exception):  # noqa: N818 - what happened, not what is wrong
    """The other side closed the connection, or sent a malformed message."""


def encode(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """`value` as JSON has it; `refer` says how an object that cannot travel by value is named."""
    kind = type(value)
    if kind in (float, str, bool) or value is None:
        return value
    if kind is int:
        return value if -(2**63) < value < 2**63 else ["i", hex(value)]
    if kind in _TAGS:
        return [_TAGS[kind], value if kind is list and _is_json(value) else [encode(item, refer) for item in value]]
    if kind in _DICTS:
        makes = [value.default_factory.__name__] if getattr(value, "default_factory", None) in _TYPES.values() else []
        return [_DICTS[kind], [[encode(key, refer), encode(item, refer)] for key, item in value.items()], *makes]
    rare = _encode_rare(value, kind)
    if rare is not None:
        return rare
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), refer)
    base = _base(kind)
    return refer(value) if base is None else encode(_OF_BASE[base](value), refer)


def _is_json(items: list[Any]) -> bool:
    """True for a list that JSON has as it is: of millions of items, each may cost nothing."""
    kinds = set(map(type, items))
    return kinds <= _JSON and (int not in kinds or (kinds == {int} and -(2**63) < min(items) <= max(items) < 2**63))


def _base(kind: type) -> type | None:
    """The builtin that decides every operator for objects of the class `kind`, which is none itself."""
    for parent in kind.__mro__:
        if parent in _OF_BASE:
            return parent
        if parent not in _ENUMS and any(_is_operator(name) for name in vars(parent)):
            return None
    return None


def _is_operator(name: str) -> bool:
    return name[:2] == "__" == name[-2:] and name[2:-2] not in _SILENT


def _encode_rare(value: Any, kind: type) -> list[Any] | None:
    if kind in (bytes, bytearray):
        return ["b" if kind is bytes else "B", value.decode("latin-1")]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is range:
        return ["r", value.start, value.stop, value.step]
    if kind is decimal.Decimal:
        return ["D", str(value)]
    if kind is fractions.Fraction:
        return ["F", hex(value.numerator), hex(value.denominator)]
    if kind in (datetime.date, datetime.datetime, datetime.time):
        return ["T", kind.__name__, value.isoformat()]
    if kind is datetime.timedelta:
        return ["P", value.days, value.seconds, value.microseconds]
    if isinstance(value, type) and value in _TYPES.values():
        return ["N", value.__name__]
    return None


def decode(message: Any, refer: Callable[[list[Any]], Any]) -> Any:
    """Inverse of `encode`, with references turned into objects by `refer`. Raises Broken for a malformed message."""
    if message is None or isinstance(message, bool | int | float | str):
        return message
    try:
        tag, *rest = message
        if tag == "l" and set(map(type, rest[0])) <= _JSON:
            return list(rest[0])
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](decode(item, refer) for item in rest[0])
        if tag in ("d", "o", "n"):
            pairs = [(decode(key, refer), decode(item, refer)) for key, item in rest[0]]
            return (
                collections.Counter(dict(pairs))
                if tag == "n"
                else collections.OrderedDict(pairs)
                if tag == "o"
                else collections.defaultdict(_TYPES[rest[1]], pairs)
                if rest[1:]
                else dict(pairs)
            )
        return _decode_rare(tag, rest) if tag in "ibBcrDFTPN" else refer(message)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise Broken(f"what came back is no value: {error}") from error


def _decode_rare(tag: str, rest: list[Any]) -> Any:
    if tag == "i":
        return int(rest[0], 16)
    if tag in "bB":
        data = rest[0].encode("latin-1")
        return data if tag == "b" else bytearray(data)
    if tag == "N":
        return _TYPES[rest[0]]
    if tag == "T":
        return _TIMES[rest[0]].fromisoformat(rest[1])
    if tag == "F":
        return fractions.Fraction(int(rest[0], 16), int(rest[1], 16))
    made = {"c": complex, "r": range, "D": decimal.Decimal, "P": datetime.timedelta}[tag]
    return made(*rest)


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message. Raises Broken when the other end is closed."""
    body = json.dumps(message).encode()
    try:
        connection.sendall(struct.pack("!Q", len(body)) + body)
    except OSError as error:
        raise Broken(str(error)) from error


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive the next message. Raises Broken at the end, for more than `LARGEST` bytes, and for anything but a JSON object."""
    size = struct.unpack("!Q", _read(connection, 8))[0]
    if size > LARGEST:
        raise Broken(f"a message of {size} bytes")
    try:
        message = json.loads(_read(connection, size))
    except (ValueError, RecursionError) as error:
        raise Broken(f"no message: {error}") from error
    if not isinstance(message, dict):
        raise Broken("no message")
    return message


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(min(size - len(parts), 2**20))
        except OSError as error:
            raise Broken(str(error)) from error
        if not part:
            raise Broken("it closed the connection")
        parts += part
    return bytes(parts)
