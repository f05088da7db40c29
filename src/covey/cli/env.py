"""`covey env`: versions and devices for a bug report, without importing any of them; `--issue [RUN]`: the facts that an issue needs, as Markdown to paste."""

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from covey import __version__
from covey.cli import output
from covey.cli.early import default_of
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Args, Verb
from covey.config.options import is_changed
from covey.errors import ConfigError, RewardError, RunFolderError, did_you_mean
from covey.files.bounded import read_json
from covey.process.terminal import safe
from covey.runs.provenance import version_of
from covey.sandbox import isolation

_LAST = 3
"""Steps and alerts of a run that are shown."""
_MOST = 300
"""Characters of a value."""


def issue(facts: Mapping[str, Any], run: str | None) -> str:
    """Markdown: versions and devices, and for a run its options, last steps and alerts. Raises RunFolderError for no run."""
    machine = {name: value for name, value in facts.items() if name not in ("packages", "environment")}
    rows = [f"{name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in machine.items()]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    rows += [f"packages: {packages}", *(f"{name}={value}" for name, value in facts["environment"].items())]
    sections = [_section("Machine", rows)]
    if run is not None:
        sections += _of_run(Path(run))
    return "\n\n".join(sections)


def _of_run(folder: Path) -> list[str]:
    manifest = folder / "run.json"
    if not manifest.is_file():
        raise RunFolderError(f"{folder} holds no run.json; give the folder of a run, such as runs/train-1.")
    run = read_json(manifest, RunFolderError)
    values = run.get("config") or {}
    options = {name: value for name, value in values.items() if is_changed(value, default_of(name))}
    parts = {name: run.get(name) for name in ("command", "state", "step", "versions")}
    parts |= {
        name: (run.get(name) or {}).get("name") for name in ("model", "algorithm") if isinstance(run.get(name), dict)
    }
    sections = [
        _section("Run", [f"{name}: {value}" for name, value in parts.items() if value is not None]),
        _section("Options that differ from the defaults", [f"{name}: {value}" for name, value in options.items()]),
    ]
    for what, file in (("steps", "metrics"), ("alerts", "alerts"), ("events", "events")):
        if lines := _tail(folder / f"{file}.jsonl"):
            sections.append(_section(f"Last {what}", lines))
    return sections


def _tail(file: Path) -> list[str]:
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 200_000))
        lines = stream.read().decode("utf-8", errors="replace").splitlines()
    return [_short(line) for line in lines[-_LAST:]]


def _short(line: str) -> str:
    try:
        values = json.loads(line)
    except ValueError:
        return line[:_MOST]
    rounded = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
    return ", ".join(f"{name} {str(value)[:_MOST]}" for name, value in rounded.items() if value is not None)


def _section(title: str, rows: list[str]) -> str:
    body = "\n".join(safe(row[: 4 * _MOST]).replace("```", "'''") for row in rows) or "none"
    return f"**{title}**\n\n```text\n{body}\n```"


_PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "pyarrow", "numpy", "peft",
    "jsonargparse", "rich", "math-verify", "triton", "vllm", "bitsandbytes", "tensorboard", "wandb", "trackio", "mlflow",
)  # fmt: skip
_FLAGS = (
    Flag(name="issue", help="Print what an issue needs, as Markdown to paste.", type=bool, group="output"),
    Flag(name="run", help="With --issue: the folder of a run, for its options, last steps and alerts.", group="output"),
    JSON,
)
_PREFIXES = ("COVEY_", "HF_", "CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "ACCELERATE_", "OMP_", "TOKENIZERS_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


def facts() -> dict[str, Any]:
    """Versions, devices and settings of this machine, secrets masked."""
    return {
        "covey": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "sandbox": _sandbox(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        "environment": {name: _mask(name) for name in sorted(os.environ) if name.startswith(_PREFIXES)},
    }


def run(args: Args) -> None:
    environment = facts()
    if args.get("issue") or args.get("run"):
        output.result(issue(environment, args.get("run")))
        return
    if args.get("json"):
        output.result_json(environment)
        return
    for name, value in environment.items():
        if isinstance(value, dict):
            output.result(f"{name}:" if value else f"{name}: none")
            for key, item in value.items():
                output.result(f"  {key:<16} {item}")
        else:
            output.result(f"{name:<18} {', '.join(value) or 'none' if isinstance(value, list) else value}")


def _sandbox() -> str:
    """Isolation of model-written code on this machine, or why it cannot be run."""
    try:
        return str(isolation())
    except RewardError as error:
        return str(error)


def _mask(name: str) -> str:
    if any(part.endswith(_SECRET) for part in name.split("_")):
        return "(set)"
    return re.sub(r"//[^/@]*@", "//(hidden)@", os.environ[name])  # a user and password in an address


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return ["nvidia-smi does not answer"]
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


_versions = Verb(
    name="env",
    usage="[--json] | --issue [RUN] | check ENVIRONMENT",
    sentence="Versions and devices, for a bug report. Values of secrets are not shown. `covey env check` examines an environment.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("run",),
    examples=("covey env", "covey env --issue runs/train-1"),
)


def verb(arguments: Sequence[str]) -> int:
    """`covey env ...` or `covey env check ...`. Returns the exit code."""
    if arguments and arguments[0] == "check":
        from covey.cli.env_check import verb as check

        return check(arguments[1:])
    if arguments and not arguments[0].startswith("-") and "--issue" not in arguments:
        raise ConfigError(
            f"covey env has no {arguments[0]!r}.{did_you_mean(arguments[0], ('check',))} It has check, and no word prints versions."
        )
    return _versions(arguments)
