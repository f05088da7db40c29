"""A tiny run of combined features, as one or several processes: `python combined_run.py FOLDER CASE(JSON)`; and how tests start it.

The model has three layers, the step is plain SGD, so that weights after some steps compare with those of another way to run.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from covey.rollout import worker_process
from delays import plant
from forked import Forked, free_port, rank_environment, worker_of
from kit import tiny_model, tiny_tokenizer

STEPS = 3


def policy(**config: Any) -> Any:
    return tiny_model("qwen2", layers=3, **{"tie_word_embeddings": False, **config})


def teacher_folder(folder: Path) -> Path:
    """Another model of the policy's vocabulary, saved."""
    place = folder / "teacher"
    if not place.exists():
        tiny_model("qwen2", layers=2, hidden=16, seed=7).save_pretrained(place)
        tiny_tokenizer().save_pretrained(place)
    return place


def seeing(kind: str, hidden: int = 32) -> tuple[Any, Any]:
    from modalities.models import tiny_vlm

    return tiny_vlm(kind, hidden=hidden)


def picture_rows(counts: list[int]) -> list[dict[str, Any]]:
    """Prompts with so many images each, over and over."""
    from modalities.models import picture

    ask = lambda i: [{"role": "user", "content": f"How many of {i}?"}]
    return [
        {"prompt": ask(i), "images": [picture(j + 1, seed=i) for j in range(counts[i % len(counts)])]}
        for i in range(4 * STEPS)
    ]


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def varied(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Rewards that differ in a group of equal completions too."""
    return [float(i % 4) for i in range(len(completion_ids))]


def trainer(folder: Path, case: dict[str, Any]) -> Any:
    """The run of a case: `options` of GRPOConfig, and what else it is made of. `late`: delays in its processes."""
    from datasets import Dataset

    from covey import GRPOConfig, GRPOTrainer

    processes = case.get("processes", 1)
    options = {
        "max_steps": STEPS, "num_generations": 2, "learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4 // processes, "max_completion_length": 4, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "logging_steps": 1, "gradient_checkpointing": False,
        "rollout_dtype": "float32",
    }  # fmt: skip
    options |= case.get("options", {})
    given: dict[str, Any] = {"processing_class": tiny_tokenizer(), "model": policy(**case.get("config", {}))}
    rows: list[dict[str, Any]] = [{"prompt": f"{i} + {i} ="} for i in range(4 * STEPS)]
    if "lora" in case:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **case["lora"])
    if "vlm" in case:
        given["model"], given["processing_class"] = seeing(case["vlm"], case.get("hidden", 32))
        rows = picture_rows(case["images"])
    if "vlm" in case and "chat" in case:
        from modalities.acting_models import acting_model

        given["model"], given["processing_class"] = acting_model(case["vlm"])
    elif "chat" in case:
        from environments.acting import chat_tokenizer, tiny_llama

        given["processing_class"] = chat_tokenizer()
        given["model"] = tiny_llama(chat_tokenizer(), **case.get("llama", {}))
        rows = [{"prompt": [{"role": "user", "content": f"{i}"}]} for i in range(4 * STEPS)]
    if "shown" in case:  # a tool that answers with an image
        from covey import algorithms as alg
        from modalities.acting_models import add_shown, row, seeing_caller

        given["model"], given["processing_class"] = seeing_caller(case["vlm"], shows=True, steps=25)
        given["tools"] = [add_shown]
        given["algorithm"] = alg.grpo().replace(
            advantage=lambda scores: 1.0 + scores.total
        )  # equal ones move weights too
        rows = [row(case["vlm"], i % 2) for i in range(4 * STEPS)]
    if "calls" in case:  # the tool `add`, when it is asked "q"
        from environments.tool_runs import calling

        given["model"] = calling(make=partial(tiny_llama, **case.get("llama", {})))
        rows = [{"prompt": [{"role": "user", "content": "q"}]}] * 4 * STEPS
    if "members" in case:
        from covey.ensembles import Ensemble

        given["ensemble"] = Ensemble(case["members"], threshold=4.0)
    if "evaluated" in case:
        given["eval_dataset"] = Dataset.from_list(rows[: case["evaluated"]])
    rewards: list[Any] = [varied if "calls" in case else reward]
    if "features" in case:
        from combinations.pairs import made_of, rewards_of

        given |= made_of(case["features"], Path(case["others"]), case["url"])
        rewards = rewards_of(case["features"], Path(case["others"]), rewards[0])
    return GRPOTrainer(
        reward_funcs=rewards, args=GRPOConfig(str(folder), **options), train_dataset=Dataset.from_list(rows), **given
    )  # fmt: skip


def run(folder: Path, processes: int = 1, seconds: float = 200.0, **case: Any) -> list[dict[str, Any]]:
    """The logs of a run of so many processes, which leaves its weights in `folder/end`."""
    port = free_port()
    words = [Path(__file__), folder, json.dumps({**case, "processes": processes})]
    env = [{} if processes == 1 else rank_environment(rank, port) for rank in range(processes)]
    ranks = [Forked(*words, env=one) for one in env]
    folder.mkdir(exist_ok=True)
    codes = [rank.wait(seconds) for rank in ranks]
    assert codes == [0] * processes, "\n".join(rank.err[-3000:] for rank in ranks)
    return json.loads((folder / "log.json").read_text())


def weights(folder: Path, when: str = "end") -> dict[str, torch.Tensor]:
    found = [*(folder / when).glob("*.safetensors")]
    return {name: value for file in found for name, value in load_file(file).items()}


def apart(one: Path, other: Path) -> float:
    """The largest difference between the weights of two runs."""
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


def moved(folder: Path) -> float:
    """How far a run moved its weights."""
    start = weights(folder, "start")
    return max((value - start[name]).abs().max().item() for name, value in weights(folder).items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker_process._start = worker_of(
        "covey.rollout.worker"
    )  # a fork; tests/rollout/test_asynchronous.py starts real ones
    place = Path(sys.argv[1])
    case = json.loads(sys.argv[2])
    plant(case.get("late", {}))
    made = trainer(place, case)
    if made.args.process_index == 0:
        made.model.save_pretrained(place / "start")
    made.train(resume_from_checkpoint=case.get("resume"))
    made.save_model(str(place / "end"))
    if made.args.process_index == 0:
        (place / "log.json").write_text(json.dumps(made.state.log_history))
