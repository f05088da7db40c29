"""A budget of tokens for thoughts in a run: the same completions from every sampler, and no gradient through what closes them."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, Member
from covey.errors import ConfigError
from covey.rollout import worker_process
from forked import worker_of
from kit import rest_nightly, tiny_model, tiny_tokenizer
from vllm_server.fake_server import FakeServer

BUDGET, CLOSING = 6, "\n</think>\n\n"
SERVER = {"use_vllm": True, "vllm_mode": "server"}
AHEAD = {"async_rollouts": True, "max_staleness": 0}
WAYS = {
    "native": {},
    "transformers": {"rollout_backend": "transformers"},
    "server": SERVER,
    "process": AHEAD,
    "server ahead": {**SERVER, **AHEAD},
}


def options(**more):
    return {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 30, "max_steps": 2, "report_to": "none",
        "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "generation_kwargs": {"do_sample": False}, "optim": "sgd",
        "learning_rate": 0.1, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "rollout_dtype": "float32",
        "thinking_token_budget": BUDGET, **more,
    }  # fmt: skip


def trained(way, folder):
    """Completions of each rollout, in token ids, and the trained weights."""
    model, seen = tiny_model(seed=1), []

    def reward(completion_ids, **columns):
        seen.append(sorted(completion_ids))
        return [float(i % 2) for i in range(len(completion_ids))]

    rows = Dataset.from_list([{"prompt": f"{i} + 2 = <think>"} for i in range(4)])
    with FakeServer(model, tiny_tokenizer(), has_digest=True) as fake:
        port = {"vllm_server_port": fake.port} if "use_vllm" in WAYS[way] else {}
        args = GRPOConfig(str(folder), **options(**WAYS[way], **port))
        trainer = GRPOTrainer(model, reward, args, rows, processing_class=tiny_tokenizer())
        trainer.train()
    return seen, list(trainer.model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*plain transformers:UserWarning")
@pytest.mark.parametrize("way", rest_nightly([*WAYS][1:], ["server", "process"]))
def test_every_sampler_closes_thoughts_as_the_native_engine_does(way, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "_start", worker_of("covey.rollout.worker"))
    native, weights = trained("native", tmp_path / "native")
    closing = tiny_tokenizer()(CLOSING)["input_ids"]
    assert all(ids[BUDGET : BUDGET + len(closing)] == closing for batch in native for ids in batch)
    there, others = trained(way, tmp_path / "there")
    assert there == native
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"thinking_token_budget": 30}, "thinking_token_budget=30 leaves no token of max_completion_length=30"),
        (
            {"use_vllm": True, "vllm_structured_outputs_regex": "a+"},
            "where vllm_structured_outputs_regex would begin anew",
        ),
    ],
)
def test_a_budget_that_cannot_act_is_refused(more, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        GRPOConfig(str(tmp_path), **options(**more))


@pytest.mark.parametrize("budget", [None, BUDGET])
@pytest.mark.parametrize("limit", [{"max_new_tokens": None}, {"max_tokens": "many"}, {"max_new_tokens": 0}])
def test_a_limit_that_is_no_number_of_tokens_is_named_with_its_option(limit, budget, tmp_path):
    (name,) = limit
    with pytest.raises(ConfigError, match=f"generation_kwargs has {name}=.* a whole number of tokens"):
        GRPOConfig(str(tmp_path), **options(thinking_token_budget=budget, generation_kwargs=limit))


def test_a_limit_of_generation_kwargs_leaves_room_for_an_answer_too(tmp_path):
    more = {"max_completion_length": None, "generation_kwargs": {"max_tokens": BUDGET}}
    with pytest.raises(ConfigError, match=f"={BUDGET} leaves no token"):
        GRPOConfig(str(tmp_path), **options(**more))


def test_members_with_the_policys_tokenizer_keep_the_budget_and_closed_thoughts_are_counted(tmp_path):
    seen = []

    def reward(completion_ids, **columns):
        seen.extend(completion_ids)
        return [float(i % 2) for i in range(len(completion_ids))]

    rows = Dataset.from_list([{"prompt": "1 + 2 = <think>"}, {"prompt": "1 + 2 ="}])
    args = GRPOConfig(str(tmp_path), **options(per_device_train_batch_size=8, max_steps=1))
    member = Member(tiny_model(seed=2), tokenizer=tiny_tokenizer())
    trainer = GRPOTrainer(tiny_model(seed=1), reward, args, rows, processing_class=tiny_tokenizer(), ensemble=[member])
    trainer.train()
    closing = tiny_tokenizer()(CLOSING)["input_ids"]
    closed = [ids[BUDGET : BUDGET + len(closing)] == closing for ids in seen]
    assert (len(closed), sum(closed)) == (10, 5)
    assert trainer.state.log_history[0]["completions/closed_thoughts_ratio"] == 0.5


def test_agents_and_rollout_functions_write_without_a_budget(tmp_path):
    args = GRPOConfig(str(tmp_path), **options())
    with pytest.raises(ConfigError, match="an agent or a rollout_func asks for its own completions"):
        GRPOTrainer("nowhere", lambda **rows: [], args, Dataset.from_list([{"prompt": "a"}]), rollout_func=print)
