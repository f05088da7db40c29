"""Pairs of features, and a tiny run of each: what test_every_pair.py runs, and what docs/combinations.md lists."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

from covey.config.combinations import AXES, FEATURES

PAIRS = [pair for pair in combinations(FEATURES, 2) if not any(set(pair) <= set(axis) for axis in AXES)]
TRIPLES = [
    ("FSDP2", "vLLM server", "asynchronous"),
    ("DDP", "vLLM server", "asynchronous"),
    ("FSDP2", "LoRA", "vLLM server"),
    ("FSDP2", "vLLM server", "tools"),
    ("FSDP2", "LoRA", "asynchronous"),
    ("FSDP2", "teacher", "asynchronous"),
    ("FSDP2", "media", "critic"),
    ("FSDP2", "media", "tools"),
    ("vLLM server", "media", "tools"),
    ("asynchronous", "media", "tools"),
    ("DDP", "media", "environment"),
    ("vLLM server", "media", "environment"),
    ("asynchronous", "media", "environment"),
    ("DDP", "media", "agent"),
    ("FSDP2", "media", "agent"),
    ("vLLM server", "media", "agent"),
    ("asynchronous", "media", "agent"),
    ("media", "agent", "ensemble"),
    ("LoRA", "vLLM server", "asynchronous"),
    ("vLLM server", "asynchronous", "tools"),
    ("vLLM server", "asynchronous", "environment"),
    ("vLLM server", "asynchronous", "agent"),
    ("DDP", "vLLM server", "agent"),
    ("FSDP2", "vLLM server", "agent"),
    ("DDP", "asynchronous", "environment"),
    ("DDP", "asynchronous", "agent"),
    ("FSDP2", "asynchronous", "environment"),
    ("FSDP2", "asynchronous", "agent"),
    ("FSDP2", "asynchronous", "tools"),
    ("asynchronous", "environment", "average"),
    ("FSDP2", "agent", "ensemble"),
    ("FSDP2", "environment", "ensemble"),
    ("asynchronous", "environment", "ensemble"),
    ("media", "environment", "ensemble"),
    ("FSDP2", "QLoRA", "vLLM server"),
    ("FSDP2", "context parallel", "LoRA"),
    ("FSDP2", "context parallel", "vLLM server"),
    ("FSDP2", "context parallel", "media"),
    ("context parallel", "media", "environment"),
]
ELSEWHERE = {
    "vLLM in process": "it needs vLLM in the environment of the run",
    "QLoRA": "it needs a GPU: bitsandbytes packs weights for inference on a CPU",
}
"""Features that these tests cannot run, and why."""
IN_PROCESS = (
    *("LoRA", "8-bit optimizer", "asynchronous", "tools", "environment", "agent", "rollout_func", "ensemble"),
    *("teacher", "served teacher", "examples", "critic", "reference sync", "process rewards", "average"),
)
"""Features that a run of one process has with vLLM in it."""
REAL = {
    ("DDP", "vLLM in process"): "tests/vllm_server/test_real_combinations.py",
    ("FSDP2", "vLLM in process"): "tests/vllm_server/test_real_combinations.py",
    ("context parallel", "vLLM in process"): "tests/vllm_server/test_real_combinations.py",
    ("vLLM in process", "media"): "tests/vllm_server/test_real_media.py",
    **{
        pair: "tests/vllm_server/test_in_process.py"
        for pair in PAIRS
        if "vLLM in process" in pair and set(pair) & {*IN_PROCESS}
    },
}
"""Pairs of them that a test of another environment has run."""


RAN = {
    tuple(line.split(" + "))
    for line in (Path(__file__).parent / "ran.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
"""Combinations whose run in test_every_pair.py has been seen to pass."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Room:
    """An environment with one tool."""

    def reset(self, **row: Any) -> None:
        self.steps, self.task = 0, sum(map(ord, str(row["prompt"][-1]["content"])))

    def get_reward(self) -> float:
        return float(self.task % 5)

    def go(self, direction: str) -> str:
        """Walk.

        Args:
            direction: north or south.
        """
        self.steps += 1
        return "a wall"


def agent(row: dict[str, Any], client: Any) -> float:
    """One call of the run's endpoint."""
    client.chat.completions.create(model="policy", messages=row["prompt"])
    return 1.0


def rollout_func(prompts: Any, trainer: Any) -> dict[str, Any]:
    render = trainer.processing_class.apply_chat_template
    ids = [render(one, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"] for one in prompts]
    ids = [one[0] if isinstance(one[0], list) else one for one in ids]  # of a processor
    written = [[i % 7 + 5, 2] for i in range(len(prompts))]
    # about what a model with random weights gives each: others would be left out of the loss
    likely = [[-5.6, -5.6]] * len(prompts)
    return {"prompt_ids": ids, "completion_ids": written, "logprobs": likely}


OPTIONS: dict[str, dict[str, Any]] = {
    "FSDP2": {"fsdp": True},
    "context parallel": {"parallelism_config": {"cp_size": 2}},
    "8-bit optimizer": {"optim": "adamw_8bit", "learning_rate": 1e-2},
    "vLLM server": {"use_vllm": True, "vllm_mode": "server"},
    "vLLM in process": {"use_vllm": True},
    "transformers": {"rollout_backend": "transformers"},
    "generate": {"generation_kwargs": {"no_repeat_ngram_size": 50}},
    "asynchronous": {"async_rollouts": True},
    "media": {"learning_rate": 0.1},
    "average": {"ema_decay": 0.5},
}


def case_of(features: tuple[str, ...], url: str | None = None) -> dict[str, Any]:
    """The case of `combined_run` with these features; `url`: of a served teacher."""
    options: dict[str, Any] = {"max_steps": 2}
    for feature in features:
        options |= OPTIONS.get(feature, {})
    case: dict[str, Any] = {"options": options, "features": list(features), "url": url}
    if {"LoRA", "QLoRA"} & set(features):
        case["lora"] = {}
    if "media" in features:
        case |= {"vlm": "qwen2_5_vl", "images": [1, 2]}
    if {"tools", "environment", "agent", "rollout_func"} & set(features):
        case["chat"] = True
    return case


def num_processes(features: tuple[str, ...]) -> int:
    return 2 if {"DDP", "FSDP2", "context parallel"} & set(features) else 1


def write_others(features: tuple[str, ...], folder: Path) -> None:
    """A teacher of the policy's shape and vocabulary, and a model that scores steps, for every process of the run."""
    from combinations.combined_run import policy, seeing
    from environments.acting import chat_tokenizer, tiny_llama
    from kit import tiny_model, tiny_tokenizer
    from modalities.acting_models import acting_model

    model, processing = policy(), tiny_tokenizer()
    if {"tools", "environment", "agent", "rollout_func"} & set(features):
        model, processing = tiny_llama(chat_tokenizer()), chat_tokenizer()
    if "media" in features:
        acts = {"tools", "environment", "agent", "rollout_func"} & set(features)
        model, processing = acting_model("qwen2_5_vl") if acts else seeing("qwen2_5_vl")
    model.save_pretrained(folder / "teacher")
    processing.save_pretrained(folder / "teacher")
    if "process rewards" in features:
        from transformers import Qwen2ForTokenClassification

        config = tiny_model("qwen2", hidden=16).config
        config.num_labels = 2
        Qwen2ForTokenClassification(config).save_pretrained(folder / "steps")
        tiny_tokenizer().save_pretrained(folder / "steps")


def made_of(features: list[str], folder: Path, url: str | None) -> dict[str, Any]:
    """Arguments of the trainer for these features; `folder`: that of `write_others`."""
    given: dict[str, Any] = {}
    if "tools" in features:
        given["tools"] = [add]
    if "environment" in features:
        given["environment_factory"] = Room
    if "agent" in features:
        given["agent"] = agent
    if "rollout_func" in features:
        given["rollout_func"] = rollout_func
    if "ensemble" in features:
        given["ensemble"] = [str(folder / "teacher")]
    algorithm = _algorithm(set(features), folder, url)
    return given if algorithm is None else {**given, "algorithm": algorithm}


def rewards_of(features: list[str], folder: Path, reward: Any) -> list[Any]:
    if "process rewards" not in features:
        return [reward]
    from covey.rewards.builtin.process_reward import ProcessReward

    return [reward, ProcessReward(model=str(folder / "steps"))]


def _algorithm(features: set[str], folder: Path, url: str | None) -> Any:
    from covey import algorithms as alg

    changes: dict[str, Any] = {}
    terms: list[Any] = []
    if "teacher" in features:
        terms.append(alg.distill(str(folder / "teacher")))
    if "served teacher" in features:
        terms.append(alg.distill(url, served_model_name="big", top_k=5))
    if "examples" in features:
        from datasets import Dataset

        rows = Dataset.from_list([{"prompt": f"{i} + {i} =", "completion": str(2 * i)} for i in range(9)])
        terms.append(alg.sft(rows, 0.3, 2))
    if terms:
        changes["regularizers"] = tuple(terms)
    if "reference sync" in features:
        changes |= {"kl": alg.KL(coefficient=0.05), "reference": alg.Every(1)}
    if not changes and "critic" not in features:
        return None
    return (alg.ppo() if "critic" in features else alg.dapo()).replace(**changes)
