"""Names that a user writes for a folder, a file, or something on the hub: which of these is meant."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from covey.errors import ArgumentTypeError, ConfigError, DataError, ModelError, RunFolderError, did_you_mean

_FILES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".xz", ".bz2", ".safetensors", ".bin", ".gguf", ".pt", ".yaml", ".yml")  # fmt: skip
_HUB_ID = re.compile(r"[\w.\-]+(/[\w.\-]+)?")
_SCHEMES = ("follow", "gym", "harbor", "verifiers")
"""Words before the colon of a data set that is neither a file, a folder nor on the hub."""


def looks_local(name: str) -> bool:
    """True if a name is written like a path: by its first character, its suffix, its depth, or because its folder exists.

    Such a name is never looked for on the hub.
    """
    text = name.strip()
    if not text or text != name or not _HUB_ID.fullmatch(text):
        return True
    if text.startswith((".", "/", "~")) or (os.sep != "/" and os.sep in text):
        return True
    first, _, rest = text.partition("/")
    return text.lower().endswith(_FILES) or text.endswith("/") or bool(rest and Path(first).is_dir())


def refuse_scheme(name: str) -> None:
    """Raise DataError for a data set like `folow:x.jsonl`: a word that is no scheme, no file and no folder before a place."""
    scheme, _, place = name.partition(":")
    is_place = "/" in place or place.lower().endswith(_FILES)
    if (
        not re.fullmatch(r"[A-Za-z]{2,}", scheme)
        or scheme in _SCHEMES
        or not is_place
        or _exists(scheme)
        or _exists(name)
    ):
        return
    raise DataError(
        f"The data set {name!r} begins with {scheme!r}, which is no kind of source.{did_you_mean(scheme, _SCHEMES)} "
        f"Those are {', '.join(_SCHEMES)}; a file or folder is written without one."
    )


def refuse_missing(name: str, what: str) -> None:
    """Raise ModelError (of a model) or DataError where a name that is written like a path stands for nothing here.

    A data set may be a mixture, a pattern, or end in `:split`; those are left to who reads them.
    """
    is_data = what == "data set"
    if is_data and name.startswith(
        tuple(f"{scheme}:" for scheme in _SCHEMES)
    ):  # a file that may come later, or no path
        return
    if is_data:
        refuse_scheme(name)
    text = re.sub(r":[A-Za-z_][\w.\-]*(\[[^\]]*\])?$", "", name) if is_data and not _exists(name) else name
    if is_data and (re.search(r"[*?+\[\]]|\s", text) or _exists(text)):
        return
    if not looks_local(text) or _exists(text):
        return
    path = Path(text).expanduser()
    where = "" if path.parent.is_dir() else f" There is no folder {str(path.parent)!r} either."
    server = " The address of a server begins with http://." if re.match(r"[\w.\-]+:\d+(/|$)", text) else ""
    hint = f"{nearest_sibling(path)}{where}{server}"
    kind = DataError if is_data else ModelError
    raise kind(f"The {what} {name!r} does not exist.{hint}")


def nearest_sibling(path: Path) -> str:
    """A sentence with the name in the folder of a missing path that is most like its own; empty without one."""
    return did_you_mean(path.name, [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else [])


def near_here(name: str, names: Iterable[str] = ()) -> str:
    """A sentence with what is named like a model or data set that is not there: `demo`, `names`, a folder here. Empty for `owner/name`."""
    if "/" in name:
        return ""
    folders: list[str] = []
    with suppress(OSError):  # a working folder that is gone, or cannot be read
        folders = [path.name for path in Path().iterdir() if path.is_dir()]
    return did_you_mean(name, ["demo", *names, *folders])


def refuse_variable(name: str, text: str) -> None:
    """Raise RunFolderError where a folder or file to write names a variable of the shell, unless it is there."""
    if re.search(r"\$[A-Za-z_{]", text) and not _exists(text):
        raise RunFolderError(
            f"{name} {text!r} names a variable of the shell, which is not read here; write it out, or ~ for $HOME."
        )


def expect_path(name: str, value: object) -> Path:
    """The path, with the user's home for `~`. Raises ArgumentTypeError for what is none."""
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"{name}={value!r:.60} is no path; give the name of a folder or file.")
    return Path(value).expanduser()


def expect_model(model: object) -> None:
    """Raise ConfigError for a number, a list, a mapping or None where a model is named or handed over."""
    if type(model).__module__ == "builtins" and not isinstance(model, str):
        raise ConfigError(f"model is of type {type(model).__name__}; give a folder, a hub id or a loaded model.")


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long a name, a zero byte, a user that is unknown
        return False


def next_folder(kind: str) -> str:
    """The next free `runs/KIND-N`."""
    taken = [path.name.removeprefix(f"{kind}-") for path in Path("runs").glob(f"{kind}-*")]
    return f"runs/{kind}-{max((int(number) for number in taken if number.isdecimal()), default=0) + 1}"
