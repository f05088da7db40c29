"""Real vLLM on a CPU with images and sounds: in the process of a run and as a server, compared with the learner before and after updates.

vLLM's code of Qwen2.5-VL needs torchvision, which the environment of `make test-vllm` lacks; it is skipped there.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from fake_server import nudged
from real_server import PYTHON, Running

from covey.data.prompts import to_prompt
from covey.models.modalities import banned_ids
from covey.rollout import SamplingParams
from covey.rollout.agreement import expect_agreement, plain_logprobs
from covey.rollout.turns import TurnSampler
from covey.rollout.vllm import ServerSampler
from modalities.models import picture, tiny_vlm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ASK = [{"role": "user", "content": "How many?"}]
ROWS = [
    {"prompt": ASK},
    {"prompt": ASK, "image": picture(2)},
    {"prompt": ASK, "images": [picture(3, (64, 32), 1), picture(1)]},
]
HIDDEN = 64
"""Of two heads: vLLM's attention on a CPU takes heads of 32 numbers and more."""
VIDEO = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
TESTS = Path(__file__).parents[1]
SCRIPT = f"""
import json, os, sys
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
sys.path[:0] = [{str(TESTS)!r}]
import torch
from combinations.combined_run import trainer
from pathlib import Path

torch.set_num_threads(1)
case = json.loads(sys.argv[1])
run = trainer(Path("run"), case)
before = {{name: p.detach().clone() for name, p in run.model.named_parameters()}}
run.train()
moved = [name for name, p in run.model.named_parameters() if not torch.equal(before[name], p)]
print("LOG", json.dumps([[e for e in run.state.log_history if "loss" in e], moved]))
"""


def has_torchvision() -> bool:
    return subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0


def kinds(*names):
    needs = pytest.mark.skipif("not has_torchvision()", reason="vLLM's code of this family needs torchvision")
    return [pytest.param(name, marks=needs) if name.startswith("qwen2_5_vl") else name for name in names]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["idefics3"])
def test_an_engine_in_the_process_sees_what_the_learner_sees(kind, lora, tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    options = {"use_vllm": True, "learning_rate": 0.1, "vllm_max_model_length": 256}
    case = {"vlm": kind, "hidden": HIDDEN, "images": [1, 2], "options": options} | ({"lora": True} if lora else {})
    done = subprocess.run(
        [PYTHON, "run.py", json.dumps(case)], cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOG "))
    logs, moved = json.loads(line.removeprefix("LOG "))
    gaps = [entry["sampling/sampling_logp_difference/max"] for entry in logs]
    print(kind, "largest gaps of three steps", gaps)  # noqa: T201 - figures for the page
    assert len(logs) == 3
    assert max(gaps) < 1e-3
    assert lora or any("vision" in name for name in moved)


@pytest.fixture
def served(request, tmp_path):
    """(server, its model here, processor) of a tiny model of the kind."""
    model, processor = tiny_vlm(request.param, hidden=HIDDEN)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    if request.param == "qwen2_5_vl":
        (tmp_path / "model" / "video_preprocessor_config.json").write_text(json.dumps(VIDEO))
    running = Running(tmp_path, str(tmp_path / "model"))
    yield running, model, processor
    running.stop()


@pytest.mark.parametrize("served", kinds("idefics3", "qwen2_5_vl"), indirect=True)
def test_a_server_sees_what_the_learner_sees_after_updates_of_the_tower_too(served, tmp_path):
    running, model, processor = served
    prompts = [to_prompt(row, f"0:{i}", f"row {i}", processor.tokenizer, {}, processor) for i, row in enumerate(ROWS)]
    sampler = ServerSampler(model, processor.tokenizer, port=running.port, directory=tmp_path, example=prompts[1])
    for version in range(3):
        sampler.load(model, version)
        expect_agreement(sampler, model, prompts[2])
        groups = list(sampler.sample(prompts, 3, SamplingParams(max_tokens=6, seed=version)))
        drawn = [one for group in groups for one in group.completions]
        gaps = [
            float((one.logprobs - b).abs().max()) for one, b in zip(drawn, plain_logprobs(model, groups), strict=True)
        ]
        seen = {name: metric.value for name, metric in sampler.take_metrics().items()}
        print("largest gap", max(gaps), seen)  # noqa: T201 - figures for the page
        assert max(gaps) < 1e-3
        nudged(model, by=0.1, seed=version)


@pytest.mark.parametrize("served", kinds("idefics3"), indirect=True)
def test_a_server_sees_the_images_of_a_prompt_in_its_later_turns(served, tmp_path):
    running, model, processor = served
    prompts = [to_prompt(row, f"0:{i}", f"row {i}", processor.tokenizer, {}, processor) for i, row in enumerate(ROWS)]
    ends = [i for i in range(100, 300) if i not in banned_ids(model)]  # so that turns are short
    options = {"port": running.port, "directory": tmp_path, "example": prompts[1], "eos_ids": ends}
    answers = lambda turns: [[40, 41, 42] if len(turn.token_ids) < 12 else None for turn in turns]
    sampler = TurnSampler(
        ServerSampler(model, processor.tokenizer, **options), answers, processor.tokenizer, 256, banned_ids(model)
    )
    gaps = []
    for version in range(2):
        sampler.load(model, version)
        groups = list(sampler.sample(prompts, 3, SamplingParams(max_tokens=40, seed=version)))
        for one, expected in zip(
            [one for group in groups for one in group.completions], plain_logprobs(model, groups), strict=True
        ):
            assert (~one.mask).any()
            gaps.append(float((one.logprobs - expected)[one.mask].abs().max()))
        nudged(model, by=0.1, seed=version)
    print("largest gap over turns", max(gaps))  # noqa: T201 - a figure for the page
    assert max(gaps) < 1e-3
