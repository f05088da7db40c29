"""Provenance of a run: source text of its parts, versions, git, hardware. Only reads; never fails a run."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from covey.data.rendering import content_text

_NOT_THE_USERS = ("covey", "torch", "transformers", "builtins", "functools")
_VERSIONS = (
    *("covey", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "peft"),
    *("pyarrow", "vllm", "bitsandbytes", "triton"),
)
MAX_TEXT = 200_000
"""Characters of one source file or of the git diff that are kept."""


def component(value: Any) -> Any:
    """Description of a part of an algorithm, as JSON: import path, parameters, and for the user's own code source and sha256.

    Dataclasses are walked field by field, partials and closures into what they hold. Anything else is its `repr`.
    """
    return _component(value, depth=0)


def user_files(value: Any) -> dict[str, dict[str, Any]]:
    """Text and sha256 of every file of the user's own in which parts of `value` are defined, by path."""
    files: dict[str, dict[str, Any]] = {}
    for name in _files_of(component(value)):
        if (text := _read(Path(name))) is not None:
            files[name] = {"sha256": _sha256(text), "text": text[:MAX_TEXT], "is_cut": len(text) > MAX_TEXT}
    return files


def file_digest(file: Path) -> str:
    """The sha256 that `user_files` records of a file, now. Raises OSError where it cannot be read."""
    return _sha256(file.read_text(encoding="utf-8", errors="replace"))


def package_versions() -> dict[str, str]:
    """Versions of Python and of packages that affect the numbers; packages that are not installed are left out."""
    versions = {name: version_of(name) for name in _VERSIONS}
    return {"python": platform.python_version()} | {name: version for name, version in versions.items() if version}


@functools.cache
def version_of(package: str) -> str | None:
    """Version of an installed package, as it was first asked for: one that is imported stays what it is. None: not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_facts(folder: Path) -> dict[str, Any] | None:
    """Commit, whether the tree differs from it, the difference (cut at MAX_TEXT), untracked names. None outside git."""
    head = _git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if head is None:
        return None
    commit, _, branch = head.partition("\n")
    diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD") or ""
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "commit": commit,
        "branch": branch.strip(),
        "is_dirty": bool(diff),
        "diff": diff[:MAX_TEXT],
        "is_diff_cut": len(diff) > MAX_TEXT,
        "untracked": untracked[:100],
    }


def hardware() -> dict[str, Any]:
    """Machine, processor, memory and GPUs."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    return {
        "machine": platform.platform(),
        "host": platform.node(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [{"name": gpu.name, "memory_gb": round(gpu.total_memory / 1e9, 1)} for gpu in gpus],
        "cuda": torch.version.cuda,
    }


def dataset_facts(dataset: Any) -> dict[str, Any] | None:
    """Fingerprint, rows and columns of a `datasets` data set; unknown ones are None (a stream has no length)."""
    if dataset is None:
        return None
    return {
        "fingerprint": getattr(dataset, "_fingerprint", None),
        "rows": len(dataset) if hasattr(dataset, "__len__") else None,
        "columns": list(getattr(dataset, "column_names", None) or []),
        "system_prompt": _system_prompt(dataset),
    }


def _system_prompt(dataset: Any) -> str | None:
    """The system message of the first row, where rows can be asked for; None without one."""
    try:
        first: Any = dataset[0]["prompt"][0] if len(dataset) else {}
    except (TypeError, LookupError, ValueError, AttributeError):
        return None
    is_system = isinstance(first, Mapping) and first.get("role") == "system"
    return content_text(first.get("content"))[:2000] if is_system else None


def adapter_facts(model: Any) -> dict[str, Any] | None:
    """Options of the LoRA adapter that is trained, by name; None without one."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return None
    chosen = next(iter(configs.values()))
    names = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
    return {name: getattr(value := getattr(chosen, name), "value", value) for name in names if hasattr(chosen, name)}


def _adapter_factors(model: Any) -> str | None:
    """Factors of adapters' products by kind of layer, as `2 for 24 q_proj, 2 for 24 v_proj`; None without any."""
    layers = [(name.rpartition(".")[2], getattr(module, "scaling", None)) for name, module in model.named_modules()]
    counts = Counter((kind, f) for kind, factors in layers if isinstance(factors, Mapping) for f in factors.values())
    return ", ".join(f"{factor:g} for {count} {kind}" for (kind, factor), count in sorted(counts.items())) or None


def model_facts(model: Any) -> dict[str, Any] | None:
    """Path of a model, its class, its dtype, the number of its parameters, in all and trained, its adapter, and which of two sets rotates it."""
    if model is None:
        return None
    from covey.models import rope_factors  # with torch, which `covey env` and `covey view` do not wait for

    weights = list(model.parameters())
    return {
        "name": str(getattr(getattr(model, "config", None), "_name_or_path", "") or "") or None,
        "class": type(model).__name__.removeprefix("FSDP"),
        "dtype": str(weights[0].dtype).removeprefix("torch.") if weights else None,
        "parameters": sum(weight.numel() for weight in weights),
        "trained": sum(weight.numel() for weight in weights if weight.requires_grad),
        "adapter": adapter_facts(model),
        **({"adapter_factors": scales} if (scales := _adapter_factors(model)) is not None else {}),
        **({"rope_factors": factors} if (factors := rope_factors(model)) is not None else {}),
    }


def weight_facts(model: Any) -> dict[str, Any]:
    """Facts of the model that its checkpoint fits: without its path, which may be another on another machine."""
    facts = model_facts(model) or {}
    return {name: value for name, value in facts.items() if name not in ("name", "adapter")}


def _component(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:2000]
    if depth > 8:
        return _text(value)
    if isinstance(value, list | tuple | Mapping) and len(value) > 100:  # a closure may hold a whole data set
        return f"{type(value).__name__} of {len(value)} items"
    inner = functools.partial(_component, depth=depth + 1)
    if isinstance(value, list | tuple):
        return [inner(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): inner(item) for key, item in value.items()}
    if isinstance(value, functools.partial):
        return {"partial": inner(value.func), "args": inner(value.args), "keywords": inner(value.keywords)}
    if inspect.isroutine(value):
        return _code(value) | _closure(value, inner)
    if inspect.isclass(value):
        return _code(value)
    if dataclasses.is_dataclass(value):
        held = {item.name: inner(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {**_code(type(value)), "fields": held}
    if callable(value):
        return {**_code(type(value)), "repr": _text(value)}
    return _text(value)


def _text(value: Any) -> str:
    """Its `repr`, without the addresses of objects, which are others in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value)[:1000])[:200]


def _code(value: Any) -> dict[str, Any]:
    """Import path; for code of the user's own also file, line, source and sha256."""
    module, name = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", repr(value))
    facts: dict[str, Any] = {"name": f"{module}:{name}"}
    if module.partition(".")[0] in _NOT_THE_USERS:
        return facts
    code = getattr(value, "__code__", None)
    try:
        if code and code.co_filename.startswith("<"):  # Python 3.13 has `python -c`'s lines for any "<string>"
            raise OSError(code.co_filename)
        lines, number = inspect.getsourcelines(value)
    except (OSError, TypeError):  # typed at a prompt, or written in C
        digest = hashlib.sha256(code.co_code + repr(code.co_consts).encode()).hexdigest() if code else None
        return facts | {"file": None, "source": None, "sha256": digest}
    source = "".join(lines)
    file = inspect.getsourcefile(value)
    return facts | {"file": file, "line": number, "source": source[:MAX_TEXT], "sha256": _sha256(source)}


def _closure(value: Any, inner: Any) -> dict[str, Any]:
    """Values that a function of the user's own carries from where it was made."""
    cells, code = getattr(value, "__closure__", None), getattr(value, "__code__", None)
    if not cells or code is None:
        return {}
    held = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            held[name] = inner(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return {"holds": held}


def _files_of(described: Any) -> set[str]:
    if isinstance(described, list):
        return set().union(*map(_files_of, described)) if described else set()
    if not isinstance(described, dict):
        return set()
    files = (
        {described["file"]}
        if isinstance(described.get("file"), str) and "site-packages" not in described["file"]
        else set()
    )
    return files.union(*map(_files_of, described.values()))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _git(folder: Path, *words: str) -> str | None:
    # a repository can name programs for git to run: none of them is
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.pager=cat", "-C", str(folder), *words]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, env=environment, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _processor() -> str:
    text = _read(Path("/proc/cpuinfo")) or ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
