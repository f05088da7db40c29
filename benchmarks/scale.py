"""One process against two, a core each: seconds of each phase of a step, and bytes that a process sends and receives in it.

    python benchmarks/scale.py --size 10m --steps 4

The same completions a step, whatever the number of processes ("fixed work"), or as many for each process ("work grows"). `whole` holds the
model on each process and sums gradients in buckets; `split` is fsdp=True. Bytes are those of the weights and gradients given to collectives:
all that is gathered, or summed, by one process. They leave out the run's own gathers (`World.gather`: completions,
metrics). gloo sums a reduce-scatter as a whole all-reduce for each process, so its times say little of NCCL's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
WAYS = {
    "1 process": (1, False, 1),
    "2 processes, whole": (2, False, 1),
    "2 processes, split": (2, True, 1),
    "2 processes, whole, work grows": (2, False, 2),
    "2 processes, split, work grows": (2, True, 2),
}
PHASES = ("rollout", "reward", "learn", "step")
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="10m", help="a shape of benchmarks/rollout.py")
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="steps that are timed; one comes before, and one after in which bytes are counted",
    )
    parser.add_argument("--completions", type=int, default=16, help="completions a step of one process")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given, json.loads(given.work))
        return
    found = {}
    for way in given.ways:
        processes, is_split, times = WAYS[way]
        found[way] = launched(given, {"processes": processes, "split": is_split, "times": times})
        print(f"{way}: {found[way]['seconds']['step']:.2f} s a step", flush=True)
    print(table(found), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "scale.json").write_text(json.dumps(found, indent=1))


def launched(given: argparse.Namespace, how: Found) -> Found:
    """What the main process of a run by so many found."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        same = ["--size", given.size, "--steps", str(given.steps), "--tokens", str(given.tokens)]
        same += ["--completions", str(given.completions), "--work", json.dumps({**how, "folder": folder})]
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(how["processes"])]
        launch += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([sys.executable, *launch, __file__, *same], check=True, env=env)
        found: Found = json.loads((Path(folder) / "found.json").read_text())
        return found


class Bytes:
    """Bytes of the tensors that this process gives to collectives, by kind."""

    def __init__(self) -> None:
        self.by_kind: dict[str, int] = {}

    def count(self) -> Any:
        from torch.utils._python_dispatch import TorchDispatchMode

        by_kind = self.by_kind

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace == "c10d":
                    kind = func.__name__.split(".")[0].strip("_")
                    by_kind[kind] = by_kind.get(kind, 0) + sum(x.nbytes for x in tensors_in(args[0]))
                return func(*args, **(kwargs or {}))

        return Mode()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for one in value for x in tensors_in(one)] if isinstance(value, (list, tuple)) else []


def work(given: argparse.Namespace, how: Found) -> None:
    """One process of a run: pinned to a core of its own."""
    rank = int(os.environ["LOCAL_RANK"])
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE.parent / "tests"))
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

    from covey import GRPOConfig, GRPOTrainer
    from kit import tiny_tokenizer
    from rollout import SHAPES

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    shape = {
        "vocab_size": 4096,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**{**shape, **SHAPES[given.size]}, eos_token_id=tokenizer.eos_token_id))
    counted = Bytes()
    mode = counted.count()

    class Marks(TrainerCallback):
        """Counts in the last step only, which is not timed: to look at every operation takes time."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == given.steps + 1:
                mode.__enter__()
            elif state.global_step == given.steps + 2:
                mode.__exit__(None, None, None)

    folder = Path(how["folder"])
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": [f"{a} + {b} =" for a in range(9) for b in range(9)]}),
        callbacks=[Marks()],
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            max_steps=given.steps + 2,
            per_device_train_batch_size=given.completions * how["times"] // how["processes"],
            num_generations=4,
            max_completion_length=given.tokens,
            rollout_dtype="float32",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            fsdp=True if how["split"] else None,  # type: ignore[arg-type]  # as transformers documents it
        ),
    )
    trainer.train()
    if rank == 0:
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][1:-1]
        seconds = {name: statistics.median(line[f"seconds/{name}"] for line in lines) for name in PHASES}
        (folder / "found.json").write_text(json.dumps({"seconds": seconds, "bytes": counted.by_kind}))


def table(found: dict[str, Found]) -> str:
    lines = [
        "| | " + " | ".join(f"{name}, s" for name in PHASES) + " | MB a step |",
        "|---|" + "--:|" * (len(PHASES) + 1),
    ]
    for way, one in found.items():
        seconds = " | ".join(f"{one['seconds'][name]:.2f}" for name in PHASES)
        moved = sum(one["bytes"].values()) / 1e6
        kinds = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in sorted(one["bytes"].items()) if size > 1e5)
        lines.append(f"| {way} | {seconds} | {moved:.1f}{f' ({kinds})' if kinds else ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
