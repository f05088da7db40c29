"""The functions and classes of modules that tests use, as they were before a program was loaded, to restore and to compare.

Standard library only.
"""

import builtins
import dataclasses
import operator
import sys
import types
from collections.abc import Iterable
from typing import Any

NO_IMPORT = ("ctypes", "_ctypes", "_testcapi", "_testinternalcapi", "_testlimitedcapi", "_xxsubinterpreters", "_interpreters", "_xxtestfuzz", "_testbuffer", "_testmultiphase")  # fmt: skip
_LEFT_OUT = frozenset(("covey", "__main__", *NO_IMPORT))
_FREE = frozenset(("__name__", "__file__", "excepthook", "unraisablehook", "displayhook", "showwarning", "__annotations__", "__abstractmethods__", "_abc_impl", "__annotations_cache__", "__doc__"))  # fmt: skip
"""Attributes that are there to be set."""


@dataclasses.dataclass
class _Part:
    """A module's or a class's names, and of its functions, classes and modules the values."""

    owner: type | None
    now: Any
    module: str
    all: frozenset[str]
    names: tuple[str, ...]
    values: tuple[Any, ...]


@dataclasses.dataclass
class _Taken:
    """A module as it was, its parts (itself and its classes), and the modules that it uses."""

    module: types.ModuleType
    parts: list[_Part]
    uses: frozenset[str]


taken: dict[str, _Taken] = {}


def take(name: str) -> _Taken | None:
    """The module loaded as `name`, as it was when this was first called; None where there is nothing."""
    module = sys.modules.get(name)
    if name not in taken and isinstance(module, types.ModuleType) and name.partition(".")[0] not in _LEFT_OUT:
        values = list(module.__dict__.values())
        classes = [value for value in values if isinstance(value, type) and value.__flags__ & _HEAP]
        parts = [_part_of(None, module.__dict__, name)]
        parts += [_part_of(kind, _dict_of(kind), str(kind.__module__)) for kind in classes]
        uses = {value.__name__ if isinstance(value, types.ModuleType) else _module_of(value) for value in values}
        taken[name] = _Taken(module, parts, frozenset(uses) if name != "builtins" else frozenset())
    return taken.get(name)


def classes() -> frozenset[int]:
    """The numbers of all classes that have been taken so far: none is a program's."""
    return frozenset(id(part.owner) for taken in taken.values() for part in taken.parts)


def _part_of(owner: type | None, now: Any, module: str) -> _Part:
    parts = {name: value for name, value in now.items() if name not in _FREE and _is_part(value)}
    return _Part(owner, now, module, frozenset(now), tuple(parts), tuple(parts.values()))


class Snapshot:
    """The functions and classes of modules that tests use, and of those that these use, as they were before a program was loaded."""

    def __init__(self, names: Iterable[str], others: frozenset[str], kinds: Iterable[type]) -> None:
        """Of the modules `names` and builtins, and of the classes `kinds`; without `others`, which the tests change themselves."""
        self._modules: dict[str, types.ModuleType] = {}
        parts = {id(kind): _part_of(kind, _dict_of(kind), "") for kind in kinds}
        waiting = ["builtins", *names]
        while waiting:
            name = waiting.pop()
            record = take(name) if name not in self._modules else None
            if record is not None:
                self._modules[name] = record.module
                waiting += record.uses
                parts.update({id(part.owner or record.module): part for part in record.parts})
        self._parts = [part for part in parts.values() if part.module.partition(".")[0] not in others | _LEFT_OUT]

    def restore(self) -> None:
        """Restore what was changed or removed, and remove what hides another's; whatever else was added stays."""
        for owner, now, name, value in self._differences():
            if value is _NEW and owner is None:
                del now[name]
            elif value is _NEW:
                type.__delattr__(owner, name)
            elif owner is None:
                now[name] = value
            else:
                type.__setattr__(owner, name, value)

    def changed(self) -> str:
        """The name of something that is not as it was; empty where all is."""
        for owner, now, name, _ in self._differences():
            where = (
                owner.__qualname__ if owner is not None else "sys.modules" if now is sys.modules else now["__name__"]
            )
            return f"{where}.{name}"
        return ""

    def _differences(self) -> list[tuple[Any, Any, str, Any]]:
        """Owners, names and former values of what differs; `_NEW` for what hides a name of Python's, or of a class."""
        modules = sys.modules
        differences: list[tuple[Any, Any, str, Any]] = [
            (None, modules, n, value) for n, value in self._modules.items() if modules.get(n) is not value
        ]
        for part in self._parts:
            now = part.now
            if not all(map(_is, map(now.get, part.names), part.values)):
                pairs = zip(part.names, part.values)  # noqa: B905
                differences += [(part.owner, now, n, value) for n, value in pairs if now.get(n) is not value]
            if len(now) > len(part.all):
                new = [n for n in now if n not in part.all and n not in _FREE]
                differences += [(part.owner, now, n, _NEW) for n in new if self._hides(part, n)]
        return differences

    def _hides(self, part: _Part, name: str) -> bool:
        if part.owner is None:
            return name in _python
        return any(other.owner is not None and name in other.all for other in self._parts)


def _module_of(value: Any) -> str:
    module = getattr(value, "__module__", "")
    return module if isinstance(module, str) else ""


def _is_part(value: Any) -> bool:
    return callable(value) or isinstance(value, str | types.ModuleType | property | classmethod | staticmethod)


_is = operator.is_
_NEW = object()
_python = dict(builtins.__dict__)
_HEAP = 1 << 9
"""The flag of classes that can be changed."""
_dict_of = type.__dict__["__dict__"].__get__
