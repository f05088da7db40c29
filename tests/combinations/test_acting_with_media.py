"""Tools and environments for prompts with images: a run over every sampler, split or ahead, has the weights of the native engine's."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset

from combinations.combined_run import apart, moved, run
from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.errors import DataError
from environments.tool_runs import Sum, add
from kit import rest_nightly
from modalities.acting_models import row, seeing_caller
from modalities.models import picture
from vllm_server.fake_server import FakeServer

WAYS = {
    "native": {},
    "transformers": {"rollout_backend": "transformers"},
    "server": {"use_vllm": True, "vllm_mode": "server"},
    "process": {"async_rollouts": True, "max_staleness": 0},
    "server ahead": {"use_vllm": True, "vllm_mode": "server", "async_rollouts": True, "max_staleness": 0},
    "generate": {"generation_kwargs": {"no_repeat_ngram_size": 500}},
}


def plain_rewards(scores):
    """[P, G] advantages without a baseline: equal completions of a group, as greedy ones are, move the weights too."""
    return scores.total


def trained(way, folder, rows=None, kind="qwen2_5_vl", text="q", **made_of):
    model, processor = seeing_caller(kind, text)
    seen = []

    def reward(prompts, completions, completion_ids, image=None, **columns):
        seen.append({"prompts": prompts, "completions": completions, "ids": completion_ids, "image": image, **columns})
        return [1000.0 + sum(ids) % 7 for ids in completion_ids]

    data = Dataset.from_list(rows or [row(kind, i % 2, "q") for i in range(12)])
    with FakeServer(copy.deepcopy(model), processor.tokenizer, has_digest=True) as fake:
        options = WAYS[way] | ({"vllm_server_port": fake.port} if "use_vllm" in WAYS[way] else {})
        args = GRPOConfig(
            str(folder), per_device_train_batch_size=4, num_generations=2, max_completion_length=256, max_steps=3, report_to="none",
            disable_tqdm=True, logging_steps=1, save_strategy="no", temperature=0.5, use_cpu=True, bf16=False, optim="sgd",
            gradient_checkpointing=False, rollout_dtype="float32", max_tool_calling_iterations=3, learning_rate=1.0, **options,
        )  # fmt: skip
        algorithm = alg.grpo().replace(advantage=plain_rewards)
        trainer = GRPOTrainer(
            model, [reward], args, data, processing_class=processor, algorithm=algorithm, **made_of
        )  # fmt: skip
        trainer.train()
        asked = list(fake.prompts)
    return trainer, seen, asked


@pytest.mark.nightly
@pytest.mark.parametrize("way", rest_nightly([*WAYS][1:], ["server"]))
def test_a_model_that_looks_calls_its_tool_as_over_the_native_engine(way, tmp_path):
    native, expected, _ = trained("native", tmp_path / "native", tools=[add])
    trainer, seen, asked = trained(way, tmp_path / way, tools=[add])
    assert [one["completions"] for one in seen] == [one["completions"] for one in expected]
    assert seen[0]["completions"][0][1] == {"role": "tool", "name": "add", "content": "7"}
    assert seen[0]["image"][0].size == picture(1).size
    logs = [line for line in trainer.state.log_history if "tools/call_frequency" in line]
    assert logs
    assert all(line["tools/call_frequency"] == 1.0 and line["tools/failure_frequency"] == 0.0 for line in logs)
    farthest = 0.0
    fresh, _ = seeing_caller("qwen2_5_vl")
    for one, other, first in zip(
        native.model.parameters(), trainer.model.parameters(), fresh.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
        farthest = max(farthest, (one - first).abs().max().item())
    assert farthest > 1e-4
    if way.startswith(
        "server"
    ):  # the second turn's prompt is the first's, its image's tokens with it, and what followed
        assert any(len(a) > len(b) + 5 and a[: len(b)] == b for a in asked for b in asked)


class Gallery(Sum):
    """An environment with the tool `add`, whose `reset` says more, or hangs a picture of its own beside the row's."""

    picture = None

    def reset(self, **row):
        super().reset(**row)
        self.has_image = row.get("image") is not None
        return [{"type": "image", "image": self.picture}] if self.picture else " and more"

    def get_reward(self) -> float:
        return 1000.0 * len(self.calls) + self.has_image


class Hung(Gallery):
    picture = picture(3, (64, 32), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("way", rest_nightly([*WAYS][:-1], ["native"]))
def test_an_environment_adds_text_to_a_prompt_with_an_image(way, tmp_path, monkeypatch):
    from covey.learner import Policy

    learnt, measure = [], Policy.measure

    def measured(self, rows, *parts, **options):
        learnt.extend(row.prompt for row in rows)
        return measure(self, rows, *parts, **options)

    monkeypatch.setattr(Policy, "measure", measured)
    trainer, seen, _ = trained(way, tmp_path, text="q and more", environment_factory=Gallery)
    assert all([one.calls for one in columns["environments"]] == [[(3, 4)]] * 4 for columns in seen)
    rewards = [line["rewards/Gallery/mean"] for line in trainer.state.log_history if "rewards/Gallery/mean" in line]
    assert rewards == [1001.0] * 3
    shown = seen[0]["prompts"][0][-1]["content"]
    assert shown == [{"type": "image"}, {"type": "text", "text": "q"}, {"type": "text", "text": " and more"}]
    assert learnt
    for prompt in learnt:
        assert "q and more" in trainer.processing_class.tokenizer.decode(prompt.token_ids)
        assert prompt.media.count == 1


@pytest.mark.slow
def test_reset_may_hang_a_picture_beside_that_of_the_row_or_where_the_row_has_none(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "q"}], "image": picture(1) if i % 2 else None} for i in range(12)]
    trainer, seen, _ = trained("native", tmp_path, rows=rows, environment_factory=Hung)
    kinds = {tuple(part["type"] for part in one["prompts"][i][-1]["content"]) for one in seen for i in range(4)}
    assert kinds == {("image", "text", "image"), ("text", "image")}
    assert any(line.get("rewards/Hung/mean", 0) > 0 for line in trainer.state.log_history)


def writes(folder, breaks=None):
    """A run whose rollout function renders its prompts by the processor, looks at their images, and samples by `generate`."""
    model, processor = seeing_caller("qwen2_5_vl")
    seen = []

    def rollout(prompts, trainer):
        torch.manual_seed(7)
        out = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        for prompt in prompts:
            read = trainer.processing_class.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
            seen.append(prompt[0]["content"][0]["image"])
            ids = read["input_ids"][0].tolist()
            barred = {"suppress_tokens": [trainer.model.config.image_token_id, trainer.model.config.video_token_id]}
            done = trainer.model.generate(**read, max_new_tokens=8, do_sample=True, **barred)[0, len(ids) :].tolist()
            if breaks == "prompt":
                ids = ids[:-1]
            out["prompt_ids"].append(ids)
            out["completion_ids"].append([trainer.model.config.image_token_id] if breaks == "completion" else done)
        return out

    args = GRPOConfig(
        str(folder), per_device_train_batch_size=4, num_generations=2, max_completion_length=8, max_steps=2, report_to="none",
        disable_tqdm=True, logging_steps=1, save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
        learning_rate=0.1, optim="sgd",
    )  # fmt: skip
    rewards = lambda completion_ids, **columns: [float(i) for i in range(len(completion_ids))]
    data = Dataset.from_list([row("qwen2_5_vl", i % 2) for i in range(4)])
    trainer = GRPOTrainer(
        model, [rewards], args, data, processing_class=processor, rollout_func=rollout, algorithm=alg.grpo().replace(advantage=plain_rewards)
    )  # fmt: skip
    return trainer, seen


@pytest.mark.slow
def test_a_rollout_function_sees_the_images_and_the_learner_too(tmp_path, monkeypatch):
    from covey.learner import Policy
    from covey.rollout.agreement import plain_logprobs
    from covey.types import Group

    compared, measure = [], Policy.measure

    def measured(self, rows, *parts, **options):
        result = measure(self, rows, *parts, **options)
        expected = plain_logprobs(self.model, [Group(prompt=one.prompt, completions=(one.completion,)) for one in rows])
        for i, plain in enumerate(expected):
            torch.testing.assert_close(result.logp[i, : len(plain)].detach(), plain, atol=1e-5, rtol=1e-5)
        compared.extend(one.prompt.media for one in rows)
        return result

    monkeypatch.setattr(Policy, "measure", measured)
    trainer, seen = writes(tmp_path)
    trainer.train()
    assert compared
    assert all(media is not None for media in compared)
    assert {image.size for image in seen} == {picture(1).size}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("prompt", r"prompt_ids that are not the \d+ of its processor"),
        ("completion", "a token that stands for an image"),
    ],
)
def test_a_rollout_function_that_moves_the_images_is_refused(breaks, said, tmp_path):
    trainer, _ = writes(tmp_path, breaks)
    with pytest.raises(DataError, match=said):
        trainer.train()


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", [{"fsdp": True}, {}], ids=["fsdp2", "ddp"])
def test_two_processes_train_an_environment_with_images_as_one(sharding, tmp_path):
    case = {"features": ["environment"], "others": str(tmp_path), "url": None, "chat": True, "vlm": "qwen2_5_vl", "images": [1, 2]}  # fmt: skip
    options = {"learning_rate": 0.1, "max_completion_length": 12}
    run(tmp_path / "1", options=options, **case)
    run(tmp_path / "2", 2, options={**options, **sharding}, **case)
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 1e-5
