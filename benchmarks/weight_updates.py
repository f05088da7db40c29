"""Seconds and megabytes of an update of the sampler's weights, by the transport that carries them: real runs, on this machine.

    python benchmarks/weight_updates.py --vllm .venv-vllm/bin/python                 # 66 and 380 million parameters

Every case is a run of some steps with a model of random weights in float32, whose log has `weights/seconds` and `weights/mb`: from the
first byte that is read until the sampler has proved the weights, or has them. The figure is the median of the steps after the first. A server is
real vLLM on this processor (`covey serve-vllm`), on a core of its own; "a part trained" is
the query projection of half of the layers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHAPES: dict[str, Any] = {
    "66m": {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 10},
    "380m": {"hidden_size": 1280, "intermediate_size": 4096, "num_hidden_layers": 17, "num_attention_heads": 20},
}
IN_MEMORY = "/dev/shm/covey-updates"
SERVER = {"use_vllm": True, "vllm_mode": "server"}
DISK, MEMORY = (
    {"vllm_transport": "directory"},
    {"vllm_transport": "directory", "vllm_directory": IN_MEMORY},
)
GLOO, UNPROVED = {"vllm_transport": "gloo"}, {"vllm_attestation": "off"}
CASES: dict[str, dict[str, Any]] = {
    # first: a server that has had whole weights gets merged ones
    "server, adapter alone": {**SERVER, "trains": "lora"},
    "server, folder on the disk": {**SERVER, **DISK},
    "server, folder in memory": {**SERVER, **MEMORY},
    "server, gloo": {**SERVER, **GLOO},
    "server, folder on the disk, not attested": {**SERVER, **DISK, **UNPROVED},
    "server, folder in memory, not attested": {**SERVER, **MEMORY, **UNPROVED},
    "server, memory": {**SERVER, "vllm_transport": "ipc"},
    "server, gloo, not attested": {**SERVER, **GLOO, **UNPROVED},
    "server, folder on the disk, a part trained": {**SERVER, **DISK, "trains": "part"},
    "server, gloo, a part trained": {**SERVER, **GLOO, "trains": "part"},
    "server, folder on the disk, two processes (FSDP2)": {**SERVER, **DISK, "fsdp": True},
    "server, gloo, two processes (FSDP2)": {**SERVER, **GLOO, "fsdp": True},
    "vLLM in the process": {"use_vllm": True},
    "worker process, asynchronous": {"async_rollouts": True},
    "native engine": {},
}


def one_run(folder: Path, model: str, options: dict[str, Any], steps: int) -> None:
    """A run in this process: the logs of its steps, on the last line."""
    import torch
    from datasets import Dataset

    from covey import GRPOConfig, GRPOTrainer
    from covey.models import load_model

    torch.set_num_threads(1)
    trains = options.pop("trains", "all")
    policy = load_model(model, {"dtype": "float32"})
    policy.requires_grad_(trains != "part")
    for layer in policy.model.layers[::2] if trains == "part" else ():
        layer.self_attn.q_proj.requires_grad_(True)
    given: dict[str, Any] = {}
    if trains == "lora":
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "max_steps": steps, "num_generations": 2, "per_device_train_batch_size": 2 // processes, "max_completion_length": 4,
        "learning_rate": 1e-3, "optim": "sgd", "use_cpu": True, "bf16": False, "rollout_dtype": "float32", "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "gradient_checkpointing": False, **options,
    }  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"{i} + {i} ="} for i in range(16)])
    rewards = [lambda completion_ids, **columns: [float(i % 2) for i in range(len(completion_ids))]]
    trainer = GRPOTrainer(policy, rewards, GRPOConfig(str(folder), **settings), rows, **given)
    trainer.train()
    if trainer.args.process_index == 0:
        print("\n" + json.dumps([entry for entry in trainer.state.log_history if "weights/mb" in entry]))


def measured(
    case: str, model: Path, folder: Path, port: int | None, given: argparse.Namespace
) -> list[dict[str, float]]:
    """The logs of a case, as a run in processes of its own."""
    options = dict(CASES[case])
    has_server = "vllm_mode" in options
    if has_server:
        options["vllm_server_port"] = port
    command = [given.vllm if "use_vllm" in options and not has_server else sys.executable]
    if "fsdp" in options:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    task = {"folder": str(folder), "model": str(model), "options": options, "steps": given.steps}
    done = subprocess.run(
        [*command, __file__, "run", json.dumps(task)], capture_output=True, text=True, check=False,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
}  # fmt: skip


@contextlib.contextmanager
def served(model: Path, folder: Path, python: str) -> Iterator[int]:
    """A server of the model in a process group of its own; its port."""
    port = free_port()
    command = [sys.executable, "-m", "covey", "serve-vllm", str(model), "--port", str(port), "--python", python]
    command += [
        "--lora-rank",
        "8",
        "--",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        str(2**28),
        "--enforce-eager",
    ]
    log = (folder / "server.log").open("ab")
    server = subprocess.Popen(
        [*command, "--max-model-len", "256"], env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
    )  # fmt: skip
    try:
        while not is_up(port):
            if server.poll() is not None:
                raise SystemExit((folder / "server.log").read_text()[-3000:])
            time.sleep(1)
        yield port
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def is_up(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def made_model(size: str, folder: Path) -> tuple[Path, int]:
    """A folder with a model of random weights and the demo's tokenizer; the number of its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from covey.demo import model_path
    from covey.models import load_tokenizer

    torch.manual_seed(0)
    heads = SHAPES[size]["num_attention_heads"]
    config = Qwen2Config(
        **SHAPES[size], num_key_value_heads=heads, vocab_size=512, max_position_embeddings=2048, eos_token_id=2, pad_token_id=0,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    load_tokenizer(None, model_path()).save_pretrained(folder)
    return folder, sum(weight.numel() for weight in model.parameters())


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        task = json.loads(sys.argv[2])
        one_run(Path(task["folder"]), task["model"], task["options"], task["steps"])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="interpreter of the environment that has vLLM")
    parser.add_argument("--size", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    given = parser.parse_args()
    for size in given.size:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, IN_MEMORY, ignore_errors=True)
            model, count = made_model(size, Path(folder) / "model")
            print(f"\n| {count / 1e6:.0f} million parameters | MB | seconds |\n|---|--:|--:|", flush=True)
            port = None
            if any("vllm_mode" in CASES[case] for case in given.cases):
                port = stack.enter_context(served(model, Path(folder), given.vllm))
            for i, case in enumerate(given.cases):
                logs = measured(case, model, Path(folder) / str(i), port, given)[1:]
                sent, seconds = (
                    statistics.median(log[name] for log in logs) for name in ("weights/mb", "weights/seconds")
                )
                print(f"| {case} | {sent:,.1f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
