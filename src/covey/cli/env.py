"""`covey env`: versions and devices for a bug report, without importing any of them."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from covey import __version__
from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.issue import issue
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError, RewardError, did_you_mean
from covey.runs.provenance import version_of
from covey.sandbox import isolation

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
        "memory_gib": _memory(),
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


def _memory() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


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
