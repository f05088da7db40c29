"""A run whose tool answers with an image: over every sampler it learns what was sampled, of the pixels of prompt and answer, and it resumes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from datasets import Dataset

from combinations.combined_run import apart, moved, run
from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.models.modalities import banned_ids, forget_positions, whole_inputs
from covey.runs import rollouts
from kit import rest_nightly
from modalities.acting_models import add_shown, row, seeing_caller
from modalities.models import picture
from vllm_server.fake_server import FakeServer

TEMPERATURE = 0.5
WAYS = {
    "native": {},
    "transformers": {"rollout_backend": "transformers"},
    "server": {"use_vllm": True, "vllm_mode": "server"},
    "server ahead": {"use_vllm": True, "vllm_mode": "server", "async_rollouts": True},
    "process": {"async_rollouts": True, "max_staleness": 0},
    "generate": {"generation_kwargs": {"no_repeat_ngram_size": 500}},
}


class Gallery:
    """An environment whose tool answers with an image alone."""

    def reset(self, **row):
        self.calls = 0

    def add(self, a: int, b: int):
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.calls += 1
        return add_shown(a, b)

    def get_reward(self) -> float:
        return 1000.0 + self.calls


def plain_rewards(scores):
    """[P, G] advantages without a baseline: equal completions of a group, as greedy ones are, move the weights too."""
    return scores.total


def trainer_of(folder, seen, model, processor, lora=False, **options):
    from peft import LoraConfig

    def reward(prompts, completions, completion_ids, **columns):
        seen.append(completions)
        return [1000.0 + sum(ids) % 7 for ids in completion_ids]

    made = {"tools": [add_shown]} if not options.pop("environment", False) else {"environment_factory": Gallery}
    made |= {"peft_config": LoraConfig(r=2, target_modules=r".*language_model.*\.(q_proj|v_proj)")} if lora else {}
    args = GRPOConfig(
        str(folder), per_device_train_batch_size=4, num_generations=2, max_completion_length=256, report_to="none", disable_tqdm=True,
        logging_steps=1, temperature=TEMPERATURE, use_cpu=True, bf16=False, optim="sgd", gradient_checkpointing=False, rollout_log_steps=1,
        rollout_dtype="float32", max_tool_calling_iterations=3, learning_rate=1e-3, **({"save_strategy": "no", "max_steps": 2} | options),
    )  # fmt: skip
    data = Dataset.from_list([row("qwen2_5_vl", i % 2, "q") for i in range(12)])
    return GRPOTrainer(
        model, [reward], args, data, processing_class=processor, algorithm=alg.grpo().replace(advantage=plain_rewards), **made
    )  # fmt: skip


def trained(way, folder, **options):
    """The trainer after its run over this sampler, and the completions that the reward was handed."""
    model, processor = seeing_caller("qwen2_5_vl", shows=True)
    seen = []
    with FakeServer(copy.deepcopy(model), processor.tokenizer, has_digest=True, lora_rank=8) as fake:
        served = {"vllm_server_port": fake.port} if "use_vllm" in WAYS[way] else {}
        trainer = trainer_of(folder, seen, model, processor, **WAYS[way], **served, **options)
        trainer.train()
    return trainer, seen


@torch.no_grad()
def plain(model, one):
    """[T] by a forward over ids and pixels of the row's whole conversation."""
    logits = model(**whole_inputs(model, one.completion.behind(one.prompt))).logits[
        0, len(one.prompt.token_ids) - 1 : -1
    ]
    forget_positions(model)
    logp = torch.log_softmax(logits.index_fill(-1, torch.tensor(banned_ids(model)), -1e6) / TEMPERATURE, -1)
    return logp.gather(-1, one.completion.token_ids[:, None])[:, 0]


@pytest.fixture
def compared(monkeypatch):
    """(images of the prompt, of all) of each row that the learner measured, compared with `plain`."""
    from covey.learner import Policy

    rows_seen, measure = [], Policy.measure

    def measured(self, rows, *parts, **options):
        result = measure(self, rows, *parts, **options)
        for i, one in enumerate(rows):
            if one.completion.mask is None:  # of rollouts that are kept for a later comparison
                continue
            written, learnt = one.completion.written, result.logp[i, : one.completion.num_tokens].detach()
            torch.testing.assert_close(learnt[written], plain(self.model, one)[written], atol=2e-5, rtol=1e-5)
            rows_seen.append((one.prompt.media.count, one.completion.media.count))
        return result

    monkeypatch.setattr(Policy, "measure", measured)
    return rows_seen


@pytest.mark.slow
@pytest.mark.parametrize("way", rest_nightly([*WAYS], ["server ahead"]))
def test_a_run_learns_the_images_of_its_tools_answers(way, tmp_path, compared):
    trainer, seen = trained(way, tmp_path)
    assert set(compared) == {(1, 2)}
    for completions in seen:
        for turns in completions:
            assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant"]
            text, image = turns[1]["content"]
            assert text == {"type": "text", "text": "7"}
            assert image["image"].tobytes() == picture(2, seed=4).tobytes()
    logs = [line for line in trainer.state.log_history if "tools/call_frequency" in line]
    assert all(line["tools/call_frequency"] == 1.0 and line["tools/failure_frequency"] == 0.0 for line in logs)
    if way != "generate":  # which reports no log-probabilities
        gaps = [line["sampling/sampling_logp_difference/max"] for line in logs]
        assert max(gaps) < 1e-4
    fresh, _ = seeing_caller("qwen2_5_vl", shows=True)
    ends, begins = trainer.model.state_dict(), fresh.state_dict()
    assert any(not torch.equal(ends[name], value) for name, value in begins.items() if "visual" in name)
    (line, *_) = rollouts.read(tmp_path / "rollouts" / "step-000001.parquet")
    shown = json.loads(line["images"])
    assert len(shown) == 2
    assert all((tmp_path / "rollouts" / "images" / name).is_file() for name in shown)
    assert [part["type"] for part in json.loads(line["conversation"])[2]["content"]] == ["text", "image"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*goes on from step:UserWarning")
def test_a_run_with_waiting_answers_resumes_exactly(tmp_path):
    more = {"max_steps": 4, "steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    whole = trainer_of(tmp_path, [], *seeing_caller("qwen2_5_vl", shows=True), **more)
    whole.train()
    again = trainer_of(tmp_path, [], *seeing_caller("qwen2_5_vl", shows=True), **more)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


@pytest.mark.slow
def test_an_environment_and_an_adapter_learn_such_answers(tmp_path, compared):
    trainer, seen = trained("native", tmp_path, environment=True, lora=True)
    assert set(compared) == {(1, 2)}
    assert all(turns[1]["content"][1]["image"].size == picture(2).size for turns in seen[0])
    moved_parts = [one for name, one in trainer.model.named_parameters() if "lora_B" in name]
    assert any(one.abs().max() > 0 for one in moved_parts)


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", rest_nightly([{"fsdp": True}, {}], 1), ids=["fsdp2", "ddp"])
def test_two_processes_train_such_answers_as_one(sharding, tmp_path):
    case = {"vlm": "qwen2_5_vl", "images": [1], "shown": True}
    options = {"learning_rate": 0.05, "max_completion_length": 256}
    run(tmp_path / "1", options=options, **case)
    run(tmp_path / "2", 2, options={**options, **sharding}, **case)
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-5
