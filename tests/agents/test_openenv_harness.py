"""OpenEnv's own harness and server, unmodified, as the agent of a run. `make test-openenv` has the package; elsewhere they are skipped."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.names import load
from covey.serving import episodes_of, read_traces
from environments.acting import chat_tokenizer, trained_on

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "openenv_harness.py"
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "3*4"}}\n</tool_call><|im_end|>'

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="openenv-core is not installed"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # it leaves event loops open
]


def calling():
    """A model that calls the calculator for three times four and reads its answer out."""
    first = (
        "<|im_start|>system\nTools: calc <|im_end|>\n<|im_start|>user\n3 times 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    then = "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    return trained_on(((first, CALL), (first + CALL + then, "12<|im_end|>")))


def test_openenv_harness_plays_on_its_server_and_its_calls_are_trained_on_token_by_token(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    server, main = load(f"{EXAMPLE}:server", "server"), load(f"{EXAMPLE}:main", "agent")
    args = GRPOConfig(
        str(tmp_path / "run"),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=256,
        max_steps=1,
        temperature=0.01,
        rollout_log_steps=1,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "3 times 4?"}]}] * 4)
    with server():
        trainer = GRPOTrainer(calling(), None, args, data, processing_class=chat_tokenizer(), agent=main)
        trainer.train()
    logged = next(line for line in trainer.state.log_history if "agents/lost" in line)
    assert (logged["agents/lost"], logged["agents/breaks"], logged["agents/calls"]) == (0.0, 0.0, 2.0)
    assert logged["rewards/main/mean"] == 1.0  # the environment's own
    assert logged["tools/calc/calls"] == 1.0
    found = episodes_of(read_traces(tmp_path / "run" / "traces" / "step-000001.jsonl")).episodes
    tokenizer = chat_tokenizer()
    assert len(found) == 4
    for one in found:
        done = one.completion
        assert tokenizer.decode(done.token_ids[done.mask]) == f"{CALL}12<|im_end|>"


def test_the_example_runs(tmp_path):
    words = [sys.executable, str(EXAMPLE), str(tmp_path), "--smoke"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"95%", done.stdout)) == 4
    steps = [json.loads(line) for line in (tmp_path / "openenv-42" / "metrics.jsonl").read_text().splitlines()]
    assert [one["agents/lost"] for one in steps if "agents/lost" in one and "loss" in one] == [0.0, 0.0]
