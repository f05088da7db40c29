"""Code that a run folder names is run again only as it ran then on this machine, unless the user says so."""

import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.verb import Args
from covey.errors import ConfigError
from covey.runs import provenance

CODE = (
    "reward", "algorithm", "alert_detectors", "tools", "environment_factory", "rollout_func", "agent",
    "dataset", "eval_dataset",
)  # fmt: skip
"""Options that may name code; a value of them that names none is listed in `_names_code`."""
_PLAIN_ARGUMENTS = frozenset(
    {
        "dtype", "torch_dtype", "attn_implementation", "device_map", "revision", "subfolder", "variant", "cache_dir", "use_cache",
        "low_cpu_mem_usage", "max_memory", "local_files_only", "quantization_config", "rope_scaling", "max_position_embeddings",
    }
)  # fmt: skip
"""Keyword arguments of `from_pretrained` that load no code."""
_SERVERS = re.compile(r"openenv:\S+|mcp:https?://\S+|gymnasium:[^:\s]+|harbor:[^:]+")
"""Tools and environments on a server, in containers, or among those that Gymnasium registers itself."""
_LIVE_OR_INSTALLED = re.compile(r"verifiers|follow:.*:|\.py\b", re.DOTALL)
"""Data out of code: an environment of verifiers, or a live source of the user's own."""


def confirm(folder: Path, recorded: Mapping[str, Any], run_json: Mapping[str, Any], args: Args, verb: str) -> None:
    """Before anything is imported for a recorded run: ask once, at a terminal, where code may not be that of the user's own run.

    `recorded` are the run's options, `run_json` its manifest, `args` the flags of this command: code that they name is trusted.
    Raises ConfigError where the answer is no, or where there is no terminal to ask on.
    """
    reasons = list(_reasons(folder, {k: v for k, v in recorded.items() if k not in args}, run_json))
    if not reasons:
        return
    sentence = "; ".join(reasons)
    if args.get("trust_source"):
        output.say(f"warning: {sentence}; it is run, and numbers may differ.")
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        output.say(f"{sentence}.")
        sys.stderr.write("Run this code? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ConfigError(f"{verb} {folder} was not started: {sentence}. Look at it; --trust-source runs it as it is now.")


def code_of(recorded: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(option, text) of every recorded value that may name code to import or a program to start."""
    values = [(option, text) for option in CODE for text in _as_list(recorded.get(option))]
    return [(option, text) for option, text in values if _names_code(option, text)]


def _reasons(folder: Path, recorded: Mapping[str, Any], run_json: Mapping[str, Any]) -> Iterator[str]:
    code = code_of(recorded)
    sources: Mapping[str, Mapping[str, str]] = run_json.get("sources") or {}
    digests = {source.get("sha256") for source in sources.values()}
    if code and not _is_of_this_machine(run_json):
        named = ", ".join(dict.fromkeys(f"{text} ({option})" for option, text in code))
        yield f"the run was made on another machine, and its options run {named}"
    else:
        files = {text: _files_in(text) for _, text in code}
        yield from (f"it cannot be told which file {text} is" for text, paths in files.items() if not paths)
        for path in dict.fromkeys(path for paths in files.values() for path in paths):
            yield from _reasons_of_file(path, folder, str(path) in sources, digests)
        if code:  # files that parts of those are defined in
            for place, source in sources.items():
                path = Path(place)
                is_among = any(path.resolve() in paths for paths in files.values())
                if path.is_file() and provenance.file_digest(path) != source.get("sha256") and not is_among:
                    yield f"{path} has changed since"
    yield from _remote_code(recorded)


def _reasons_of_file(path: Path, folder: Path, is_source: bool, digests: set[str | None]) -> Iterator[str]:
    if path.is_relative_to(folder.resolve()):
        yield f"{path} lies in the run's own folder, so it may come from whoever made that"
    elif provenance.file_digest(path) not in digests:
        yield f"{path} has changed since" if is_source else f"run.json does not hold the text of {path}"


def _remote_code(recorded: Mapping[str, Any]) -> Iterator[str]:
    """Options that run code shipped with a model, or a kernel of the hub."""
    if recorded.get("trust_remote_code"):
        yield "its options run the code beside the model (trust_remote_code)"
    for option in ("model_init_kwargs", "teacher_model_init_kwargs"):
        arguments = recorded.get(option)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {arguments[:80]: None}
        for name, value in arguments.items() if isinstance(arguments, Mapping) else ():
            if name not in _PLAIN_ARGUMENTS or ("attn" in name and not re.fullmatch(r"\w+", str(value))):
                yield f"{option} has {name}={value!r}, which may run code beside the model or of the hub"


def _is_of_this_machine(run_json: Mapping[str, Any]) -> bool:
    """True if run.json names this machine and a folder that is here; a folder that was sent names another."""
    hardware, place = run_json.get("hardware"), run_json.get("working_folder")
    host = hardware.get("host") if isinstance(hardware, Mapping) else None
    return host == platform.node() and isinstance(place, str) and Path(place).is_dir()


def _as_list(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return [str(item) for item in (value if isinstance(value, list | tuple) else [value]) if item is not None]


def _names_code(option: str, text: str) -> bool:
    """True unless a value certainly names a built-in, a model, a file of data or a server."""
    if option in ("dataset", "eval_dataset"):
        return _LIVE_OR_INSTALLED.search(text) is not None
    if option == "reward":
        return _is_import(text) or "allow_unisolated" in text
    if option == "algorithm":
        base, *changes = text.split(",")
        return ":" in base or any(map(_is_import, changes))
    return _SERVERS.fullmatch(text.strip()) is None


def _is_import(text: str) -> bool:
    """True for a colon in a name; those in the arguments of a call are values."""
    return ":" in (text.partition("(")[0] if text.strip().endswith(")") else text)


def _files_in(text: str) -> list[Path]:
    """The Python files that a value names, by path or as a module; empty when one of them cannot be located."""
    names = [
        piece for piece in re.split(r"[\s,=+*()'\"]+", text.partition("(")[0] if "(" in text else text) if ":" in piece
    ]
    if "(" in text and ":" in text.partition("(")[2]:
        return []
    files = [_file_of(name.rpartition(":")[0].removeprefix("follow:")) for name in names]
    return [file for file in files if file is not None] if all(files) else []


def _file_of(where: str) -> Path | None:
    """The file at a path, or of a module in this folder or on the path of imports. Nothing is imported to see."""
    if where.endswith(".py"):
        path = Path(where).expanduser().resolve()
        return path if path.is_file() else None
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", where):
        return None
    inside = where.replace(".", "/")
    places = [
        Path(base or ".") / name for base in ("", *sys.path) for name in (f"{inside}.py", f"{inside}/__init__.py")
    ]
    return next((path.resolve() for path in places if path.is_file()), None)
