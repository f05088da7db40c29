"""Every metric that docs/runs.md lists is in the metrics.jsonl of a run that has it, and every metric there is listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from faults.small_runs import lines, trainer

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
ROWS = [{"prompt": f"Tom has {i} apples.", "task": "ab"[i % 2]} for i in range(12)]
ELSEWHERE = {
    *(
        "clock_offset",
        "aux_loss",
        "completions/closed_thoughts_ratio",
        "experts/max_load",
        "experts/entropy",
        "experts/changed",
        "value_loss",
        "value_grad_norm",
        "memory/rollout_device_peak_gb",
        "memory/learn_device_peak_gb",
    ),
    *(f"same_language/<column>=<value>{end}" for end in ("", "/low", "/high")),  # a column of languages
    *("languages/<code>/count", "languages/<code>/same"),  # a column of languages
    *("prompts/drift_p/length", "prompts/drift_p/text", "rewards/drift_p"),  # at the end of a block of steps
    *(
        "rewards/<name>/weight",
        "rewards/<name>/timeouts",
        "rewards/<name>/cached",
        "completions/left_out",
        "sft/left_out",
    ),
}
"""Of a clock that was set, of models with experts, of critics, of GPUs, of rewards with a schedule, a worker or a memory, of memory that ran out."""


def ab_format(completions: list[str], **columns: Any) -> list[float]:
    return [float("a" in text) for text in completions]


def half(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(ids[0] % 2) for ids in completion_ids]


def failing(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    if trainer_state.global_step >= 2:  # a reward that fails on all of the first batch ends the run
        raise ConnectionError("nobody there")
    return [0.0] * len(completions)


def listed() -> list[str]:
    """The names in the tables of metrics, `<...>` for what differs from run to run."""
    part = PAGE.split("## Metrics", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all metrics of a short run with everything that a small model can have."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    given = {"max_steps": 12, "save_strategy": "no", "beta": 0.01, "metrics_by": ["task"]}
    given |= {"reward_error_limit": 1000, "reward_weights": [1.0, 0.0, 0.0]}
    given["generation_kwargs"] = {"stop_strings": list("abcdefghijklmnopqrstuvwxyz")}
    data = Dataset.from_list(ROWS)
    one = trainer(folder, train_dataset=data, reward_funcs=[half, ab_format, failing], learning_rate=1e-4, **given)
    one.train()
    return {name for line in lines(folder) for name in line}


def pattern(name: str) -> str:
    return re.sub(r"<[^>]+>", "[^/]+", re.sub(r"[.+]", r"\\\g<0>", name))


@pytest.mark.slow
def test_every_listed_metric_is_written(written: set[str]) -> None:
    missing = [name for name in listed() if not any(re.fullmatch(pattern(name), seen) for seen in written)]
    assert set(missing) <= ELSEWHERE, missing


@pytest.mark.slow
def test_every_written_metric_is_listed(written: set[str]) -> None:
    patterns = [pattern(name) for name in listed()]
    assert [seen for seen in sorted(written) if not any(re.fullmatch(one, seen) for one in patterns)] == []
