"""A run whose agent shows the row's image and then one of its own: what it learns is what was sampled, over every sampler, and it resumes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from datasets import Dataset

from combinations.combined_run import apart, moved, run
from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.errors import DataError
from covey.runs import rollouts
from covey.serving import read_traces
from kit import rest_nightly
from modalities.acting_models import acting_model, row
from modalities.agents import png
from modalities.models import picture
from vllm_server.fake_server import FakeServer

WAYS = {
    "native": {},
    "transformers": {"rollout_backend": "transformers"},
    "server": {"use_vllm": True, "vllm_mode": "server"},
    "process": {"async_rollouts": True, "max_staleness": 0},
}


def looks(row, client):
    """The row's image, then another that hangs on the answer: the same for the same draws."""
    messages = list(row["prompt"])
    for _ in range(2):
        said = (
            client.chat.completions.create(model="policy", messages=messages, max_tokens=8).choices[0].message.content
        )
        shown = png(picture(1 + len(said) % 3, seed=len(said) % 5))
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [shown, {"type": "text", "text": "?"}]},
        ]
    return float(len(said) % 3)


def trainer_of(folder, model, processor, **options):
    args = GRPOConfig(
        str(folder), per_device_train_batch_size=4, num_generations=2, max_completion_length=300, report_to="none",
        disable_tqdm=True, logging_steps=1, use_cpu=True, bf16=False, optim="sgd", learning_rate=0.5, rollout_log_steps=1,
        gradient_checkpointing=False, rollout_dtype="float32", **({"save_strategy": "no", "max_steps": 2} | options),
    )  # fmt: skip
    data = Dataset.from_list([row("qwen2_5_vl", i % 3) for i in range(12)])
    advantage = lambda scores: 1.0 + scores.total  # equal episodes of a group move the weights too
    algorithm = alg.grpo().replace(advantage=advantage)
    return GRPOTrainer(
        model, None, args, data, processing_class=processor, algorithm=algorithm, agent=looks
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", rest_nightly([*WAYS], ["server"]))
def test_a_run_learns_the_images_that_its_agent_shows(way, tmp_path, monkeypatch):
    from covey.learner import Policy
    from covey.rollout.agreement import plain_logprobs
    from covey.types import Group

    seen, measure = [], Policy.measure

    def measured(self, rows, *parts, **options):
        result = measure(self, rows, *parts, **options)
        groups = [Group(prompt=one.prompt, completions=(one.completion,)) for one in rows]
        for i, (one, plain) in enumerate(zip(rows, plain_logprobs(self.model, groups), strict=True)):
            if one.completion.logprobs is None:  # of rollouts that are kept for a later comparison
                continue
            written = one.completion.written
            torch.testing.assert_close(
                result.logp[i, : len(plain)].detach()[written], plain[written], atol=1e-5, rtol=1e-5
            )
            if next(self.model.parameters()).requires_grad:  # not the reference
                torch.testing.assert_close(one.completion.logprobs[written], plain[written], atol=1e-4, rtol=1e-4)
            seen.append((one.prompt.media.count, one.completion.media.count))
        return result

    model, processor = acting_model("qwen2_5_vl")
    before = copy.deepcopy(model.state_dict())
    with FakeServer(copy.deepcopy(model), processor.tokenizer, has_digest=True) as fake:
        options = WAYS[way] | ({"vllm_server_port": fake.port} if "use_vllm" in WAYS[way] else {})
        trainer = trainer_of(tmp_path, model, processor, **options)
        monkeypatch.setattr(Policy, "measure", measured)
        trainer.train()
    assert set(seen) == {(1, 2)}
    assert any(
        not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items() if "visual" in name
    )
    (line, *_) = rollouts.read(tmp_path / "rollouts" / "step-000001.parquet")
    shown = json.loads(line["images"])
    assert len(shown) == 2
    assert all((tmp_path / "rollouts" / "images" / name).is_file() for name in shown)
    with pytest.raises(DataError, match="has images, sounds or videos, which traces do not hold"):
        read_traces(tmp_path / "traces" / "step-000001.jsonl")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*goes on from step:UserWarning")
def test_a_run_with_waiting_episodes_resumes_exactly(tmp_path):
    options = {
        "max_steps": 4,
        "steps_per_generation": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "num_iterations": 2,
    }
    whole = trainer_of(tmp_path, *acting_model("qwen2_5_vl"), **options)
    whole.train()
    again = trainer_of(tmp_path, *acting_model("qwen2_5_vl"), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("sharding", rest_nightly([{"fsdp": True}, {}], 1), ids=["fsdp2", "ddp"])
def test_two_processes_train_an_agent_with_images_as_one(sharding, tmp_path):
    case = {"features": ["agent"], "others": str(tmp_path), "url": None, "chat": True, "vlm": "qwen2_5_vl", "images": [1, 2]}  # fmt: skip
    options = {"learning_rate": 0.1, "max_completion_length": 12}
    run(tmp_path / "1", options=options, **case)
    run(tmp_path / "2", 2, options={**options, **sharding}, **case)
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-5
