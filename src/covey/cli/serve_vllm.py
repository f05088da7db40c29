"""`covey serve-vllm`: a vLLM server whose weights a run can update and prove."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import Args, Verb


def run(args: Args, more: Sequence[str]) -> int:
    """Replace this process by the server, or print its command."""
    from covey.rollout.vllm.serving import serve_command

    names = ("host", "port", "python", "lora_rank", "allow_network")
    options: dict[str, Any] = {name: args[name] for name in names if args.get(name) is not None}
    command, environment = serve_command(args["model"], more=more, **options)
    if args.get("dry_run"):
        ours = {name: environment[name] for name in environment if os.environ.get(name) != environment[name]}
        output.result(" ".join([*(f"{name}={value}" for name, value in ours.items()), *map(shlex.quote, command)]))
        return 0
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def flags() -> Sequence[Flag]:
    return (
        Flag(name="model", help="The model of the run: a folder, a hub id, or demo.", type=str, group="server"),
        Flag(name="host", help="Address to listen on; left out: 127.0.0.1.", type=str, group="server"),
        Flag(name="port", help="Port; 8000 unless given.", type=int, group="server"),
        Flag(
            name="python",
            help="Python of the environment that has vLLM; left out: this one.",
            type=str,
            group="server",
        ),
        Flag(name="lora_rank", help="Take adapters alone, up to this rank.", type=int, group="server"),
        Flag(name="allow_network", help="Let --host be an address that others reach.", type=bool, group="server"),
        Flag(name="dry_run", help="Print the command and stop.", type=bool, group="server"),
    )


serve = Verb(
    name="serve-vllm",
    usage="MODEL [options] [-- options of vllm serve]",
    sentence="Start a vLLM server on this machine whose weights a run can update (use_vllm, vllm_mode=server) and prove.",
    flags=flags,
    run=lambda args: run(args, ()),
    positional=("model",),
    needs={"model": "the model of the run: covey serve-vllm Qwen/Qwen2.5-0.5B-Instruct."},
    places={"model": "model folder"},
    examples=(
        "covey serve-vllm Qwen/Qwen2.5-0.5B-Instruct --port 8000",
        "covey serve-vllm demo --python .venv-vllm/bin/python -- --dtype float32 --enforce-eager",
    ),
)


def verb(arguments: Sequence[str]) -> int:
    """Arguments behind `--`, which go to vLLM as they are."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    return replace(serve, run=lambda args: run(args, words[cut + 1 :]))(words[:cut])
