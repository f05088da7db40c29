"""Values of a program as data with the same comparisons: its own classes too, where they leave every operator to a builtin.

A named tuple is a tuple, a member of an IntEnum an integer. An object whose class brings an operator of its own, and what is no
builtin at all, stays where it is and becomes a reference. Nothing here runs a method of the object's. Standard library only.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
from collections.abc import Callable
from typing import Any

from covey.rewards.sandbox import wire

REFERENCE = ["R"]
_MOST = 1_000_000
"""Most values in one answer; a longer one cannot be right."""
_resolution = type.__dict__["__mro__"].__get__
_names = type.__dict__["__dict__"].__get__
_SILENT = frozenset(
    [
        "new",
        "init",
        "init_subclass",
        "repr",
        "str",
        "format",
        "doc",
        "module",
        "dict",
        "weakref",
        "slots",
        "annotations",
        "getattr",
        "getattribute",
        "setattr",
        "delattr",
        "reduce",
        "reduce_ex",
        "getnewargs",
        "getnewargs_ex",
        "getstate",
        "setstate",
        "copy",
        "deepcopy",
        "sizeof",
        "dir",
        "qualname",
        "match_args",
        "class_getitem",
        "set_name",
        "del",
        "class",
        "orig_bases",
        "parameters",
        "subclasshook",
        "static_attributes",
        "firstlineno",
        "annotate",
        "annotations_cache",
        "annotate_func",
        "call",
        "enter",
        "exit",
        "missing",
        "replace",
        "setitem",
        "delitem",
        "post_init",
        "type_params",
    ]
)
"""Special methods that no operator, comparison or builtin function asks."""
_ENUMS = frozenset(
    id(kind) for kind in (enum.Enum, enum.IntEnum, getattr(enum, "StrEnum", None), getattr(enum, "ReprEnum", None))
)
_EXACT = (
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, complex, bytes,
    bytearray, range, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter, int, float, bool,
    str, list, tuple, set, frozenset, dict, type(None),
)  # fmt: skip
_PLAIN = frozenset(id(kind) for kind in _EXACT)  # by number: a class may have a metaclass that says it equals another
_OF_BASE: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    str: str.__str__,
    bytes: lambda value: b"".join([value]),
    list: lambda value: [*list.__iter__(value)],
    tuple: lambda value: (*tuple.__iter__(value),),
    dict: lambda value: {key: value for key, value in dict.items(value)},  # noqa: C416 - dict(value) asks its methods
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset([*frozenset.__iter__(value)]),
}
"""Conversion by base class: the exact value of an object of a subclass."""
_BASES = {id(kind): kind for kind in _OF_BASE}


def encode(value: Any) -> tuple[Any, bool]:
    """`value` in the form that `wire.decode` reads, and whether all of it is data. Raises ValueError for too much of it."""
    left = [_MOST]
    whole = [True]

    def walk(value: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("more values than anybody expects")
        kind = type(value)
        if id(kind) not in _PLAIN:
            base = _base(kind)
            if base is None:
                named = kind is type and id(value) in _NAMED
                whole[0] = whole[0] and named
                return ["N", value.__name__] if named else REFERENCE
            value, kind = _OF_BASE[base](value), base
        if kind in (list, tuple, set, frozenset, collections.deque):
            return [_TAGS[kind], [walk(item) for item in value]]
        if kind in _DICTS:
            return [_DICTS[kind], [[walk(key), walk(item)] for key, item in dict.items(value)]]
        return wire.encode(value, _refuse)

    try:
        return walk(value), whole[0]
    except RecursionError:
        return REFERENCE, False


_TAGS: dict[Any, str] = {list: "l", tuple: "t", set: "s", frozenset: "f", collections.deque: "q"}
_NAMED = frozenset(id(kind) for kind in wire._TYPES.values())
_DICTS: dict[Any, str] = {
    dict: "d",
    collections.OrderedDict: "o",
    collections.defaultdict: "d",
    collections.Counter: "n",
}


def _refuse(value: Any) -> list[Any]:
    raise ValueError("no data")


def _base(kind: type) -> type | None:
    """The builtin that decides every operator for objects of the class `kind`, which is none itself."""
    for parent in _resolution(kind):
        if id(parent) in _BASES:
            return _BASES[id(parent)]
        if id(parent) not in _ENUMS and any(_is_operator(name) for name in _names(parent)):
            return None
    return None


def _is_operator(name: str) -> bool:
    return name[:2] == "__" == name[-2:] and name[2:-2] not in _SILENT
