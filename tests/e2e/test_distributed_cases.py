"""The case files of examples/distributed: every option is one that the run takes, and each trains at toy size with its own features."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from covey.cli import main
from covey.models import load_tokenizer
from environments.acting import chat_tokenizer, tiny_llama
from forked import Forked, free_port, rank_environment
from kit import tiny_model, tiny_tokenizer
from vllm_server.fake_server import FakeServer

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = sorted((EXAMPLES / "distributed" / "cases").glob("*.yaml"))
SMALL = {
    "dataset": "demo", "reward": "length(target=3)", "max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 2,
    "max_completion_length": 4, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
    "lora_r": 2, "disable_tqdm": True,
}  # fmt: skip
ROOM = '''
class Room:
    def reset(self, **row):
        return " You are in a room."

    def go(self, direction: str) -> str:
        """Walk.

        Args:
            direction: north or south.
        """
        return "a wall"
'''
NAMES = [case.stem for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_its_options_are_those_of_a_run(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(case), "--print-config"]) == 0, capsys.readouterr().err
    shown = yaml.safe_load(capsys.readouterr().out)
    for name, value in yaml.safe_load(case.read_text()).items():
        assert shown[name] in (value, [value], str(value).lower()), name


OF_GSM8K = {"dataset_config": "main", "prompt_column": "question"}
"""Without the first the hub's library refuses the set, without the second there is no prompt."""


def test_files_that_train_on_gsm8k_name_its_configuration_and_its_column():
    files = [*EXAMPLES.rglob("*.yaml"), *(EXAMPLES.parent / "src" / "covey" / "recipes").glob("*.yaml")]
    read = {
        file.name: yaml.safe_load(file.read_text()) for file in files if "dataset: openai/gsm8k" in file.read_text()
    }
    assert len(read) > 20
    assert {name for name, options in read.items() if not OF_GSM8K.items() <= options.items()} == set()


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_it_trains_at_toy_size(case, tmp_path):
    options = yaml.safe_load(case.read_text())
    is_chat = "environment_factory" in options
    model = tiny_llama(chat_tokenizer()) if is_chat else tiny_model("qwen2", tie_word_embeddings=False)
    tokenizer = chat_tokenizer() if is_chat else tiny_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "room.py").write_text(ROOM)
    options = {name: value for name, value in options.items() if name not in (*OF_GSM8K, "system_prompt")}
    small = {name: value for name, value in SMALL.items() if name != "lora_r" or "lora_r" in options}
    options |= {**small, "model": str(tmp_path / "model"), "output_dir": str(tmp_path / "run")}
    if is_chat:
        options |= {"environment_factory": "room.py:Room", "dataset": "tasks.jsonl"}
        rows = [{"prompt": [{"role": "user", "content": f"Find exit {i}."}]} for i in range(8)]
        (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    served = load_tokenizer(None, tmp_path / "model")
    with FakeServer(model, served, has_digest=True) as fake:
        options |= {"vllm_server_port": fake.port} if "use_vllm" in options else {}
        (tmp_path / "case.yaml").write_text(yaml.safe_dump(options))
        port, processes = free_port(), 2 if options.get("fsdp") else 1
        env = [rank_environment(rank, port) if processes > 1 else {} for rank in range(processes)]
        words = ["-c", "import sys; from covey.cli import main; sys.exit(main())", "train", "--config", "case.yaml"]
        ranks = [Forked(*words, env=one, cwd=tmp_path) for one in env]
        codes = [rank.wait(200) for rank in ranks]
    assert codes == [0] * processes, "\n".join(rank.err[-3000:] for rank in ranks)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
