"""Names to objects: `"dapo"` is a built-in, `"my_pkg.mod:fn"` or `"file.py:fn"` is the user's own."""

import hashlib
import importlib
import importlib.util
import inspect
import numbers
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from covey.errors import ConfigError, CoveyError, did_you_mean
from covey.raised import with_place

_USER_MODULE = re.compile(r"\bcovey_user_(\w+)_[0-9a-f]{12}:")
"""Module of a file that the user named, as `_load_file` calls it."""


def find(name: str, built_in: Mapping[str, Any], kind: str) -> Any:
    """The built-in called `name`, or the object at an import path.

    `kind` is the word for the error message, such as "algorithm". Importing a path runs the user's code.
    Raises ConfigError with the nearest name on a typo, or with the reason an import path failed.
    """
    if ":" in name:
        return load(name, kind)
    if name in built_in:
        return built_in[name]
    raise ConfigError(
        f"{name!r} is not a built-in {kind}.{did_you_mean(name, built_in)} "
        + (f"Known: {', '.join(sorted(built_in))}; or give" if built_in else "Give")
        + " your own as 'package.module:function' or 'file.py:function'."
    )


def lazy(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` of a package whose public names are imported on first use: light modules must not wait for torch.

    `where`: names, separated by spaces, by the module of the package that has them.
    """
    modules = {name: module for module, names in where.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get


def rule_of(detector: Any) -> str:
    """The name of the alert that a detector of the user's own reports: its `rule`, or its function's name."""
    target = load(detector, "alert detector") if isinstance(detector, str) else detector
    if not callable(target):
        raise ConfigError(f"alert_detectors has {target!r}, which cannot be called; give a function of a history.")
    return str(getattr(target, "rule", None) or getattr(target, "__name__", type(target).__name__))


def load(path: str, kind: str) -> Any:
    """The object at `package.module:attribute` or `path/to/file.py:attribute`.

    A file may import its neighbours. Raises ConfigError when the module, the file or the attribute is missing.
    """
    where, _, attribute = path.rpartition(":")
    if not where or not attribute or where.startswith("."):
        raise ConfigError(f"{kind} {path!r} is no import path; write 'file.py:name' or 'package.module:name'.")
    module = _load_file(Path(where), kind) if where.endswith(".py") else _load_module(where, kind, path)
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(f"{kind} {path!r}: {where} has no {attribute!r}.{did_you_mean(attribute, public)}")
    return getattr(module, attribute)


def as_written(name: str) -> str:
    """The name as the user wrote it: `reward.py:right`, where the module of a loaded file is called otherwise."""
    return _USER_MODULE.sub(r"\1.py:", name)


def _load_file(file: Path, kind: str) -> Any:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise ConfigError(
            f"{kind} file {file} does not exist; give the path of a Python file, then ':' and a name in it."
        )
    name = f"covey_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and dataclasses look the module up while it runs
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # its neighbours can be imported; last, so that they hide no package
    try:
        with _importing(f"{kind} file {file}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _importing(what: str) -> Iterator[None]:
    """Context in which an exception, or an exit, of the user's module is a ConfigError that names the line."""
    try:
        yield
    except CoveyError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} fails when it is imported, with {with_place(error)}.") from error


def _load_module(where: str, kind: str, path: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script does not see the user's own folder otherwise
    try:
        with _importing(f"{kind} {path!r}"):
            return importlib.import_module(where)
    except ConfigError as error:
        name = getattr(error.__cause__, "name", None)
        if isinstance(error.__cause__, ModuleNotFoundError) and (where == name or where.startswith(f"{name}.")):
            raise ConfigError(
                f"{kind} {path!r}: no module {name!r} here; run from the folder that holds it, or write 'file.py:name'."
            ) from error
        raise


_PLAIN = {f"{kind}{none}": kind for kind in ("bool", "int", "float") for none in ("", " | None")}
"""Types of options that are checked by their annotation, which is text here; in transformers they are types."""


def refuse_other_types(config: Any) -> None:
    """Raise ConfigError for a field of a dataclass whose value is no number, no whole number, or not True or False: "no" would count as yes."""
    declared: dict[str, Any] = {}  # not `field.type`, which transformers' HfArgumentParser changes in place
    for owner in reversed(type(config).__mro__):
        declared |= inspect.get_annotations(owner)
    for field in fields(config):
        value, kind = getattr(config, field.name), declared.get(field.name)
        plain = _PLAIN.get(str(getattr(kind, "__name__", kind)))
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value
        if plain is None or value is None or value == field.default:
            continue
        if plain == "bool" and not (isinstance(value, bool) or (is_number and value in (0, 1))):
            more = ", not text" if isinstance(value, str) else ""
            raise ConfigError(f"{field.name}={value!r} must be True or False{more}.")
        if plain != "bool" and not (is_number and (plain == "float" or value % 1 == 0)):
            whole = "a whole number" if is_number else "a number"
            raise ConfigError(f"{field.name}={value!r} must be {whole}.")
