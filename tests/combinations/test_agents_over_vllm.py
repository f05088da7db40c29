"""An agent's loop over a vLLM server, also ahead, and over transformers: its calls are recorded to the token, as by the native engine."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.data.prompts import to_prompt
from covey.environments import Agent
from covey.errors import DataError
from covey.rollout import SamplingParams, choose_sampler, worker_process
from covey.rollout.agreement import plain_logprobs
from covey.serving import AgentSampler
from environments.acting import chat_tokenizer, tiny_llama
from forked import worker_of
from kit import rest_nightly
from vllm_server.fake_server import FakeServer

pytest.importorskip("openai")
WAYS = {
    "native": {},
    "server": {"use_vllm": True, "vllm_mode": "server"},
    "ahead": {"use_vllm": True, "vllm_mode": "server", "async_rollouts": True},
    "transformers": {"rollout_backend": "transformers"},
    "process": {"async_rollouts": True, "max_staleness": 0, "in_flight_weights": False},
    "processes": {"async_rollouts": True, "max_staleness": 0, "rollout_workers": 2},
    "process ahead": {"async_rollouts": True},
    "transformers in a process": {"async_rollouts": True, "max_staleness": 0, "rollout_backend": "transformers"},
}
AHEAD = ("ahead", "process ahead")
REPLIES = ("go on", "and then?")


@pytest.fixture(autouse=True)
def _worker(monkeypatch):
    """The process that samples is a fork that has imported everything; `tests/rollout/test_asynchronous.py` starts real ones."""
    monkeypatch.setattr(worker_process, "_start", worker_of("covey.rollout.worker"))


def conversing(row, client):
    """Three calls, of which the later two continue the first. Scored by what was written."""
    messages, written = list(row["prompt"]), []
    for reply in (*REPLIES, None):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
        written.append(answer.choices[0].message.content)
        messages += [{"role": "assistant", "content": written[-1]}, {"role": "user", "content": reply or ""}]
    return float(sum(map(len, written)) % 5)


def trained(way, folder):
    model = tiny_llama(chat_tokenizer())
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"question {i}"}]} for i in range(12)])
    seen = []

    def reward(completion_ids, **columns):
        seen.append(completion_ids)
        return [float(sum(ids) % 7) for ids in completion_ids]

    with FakeServer(model, chat_tokenizer(), has_digest=True) as fake:
        options = WAYS[way] | ({"vllm_server_port": fake.port} if "use_vllm" in WAYS[way] else {})
        args = GRPOConfig(
            str(folder), per_device_train_batch_size=4, num_generations=2, max_completion_length=160, max_steps=3, report_to="none",
            disable_tqdm=True, logging_steps=1, save_strategy="no", temperature=0.01, use_cpu=True, bf16=False,
            gradient_checkpointing=False, rollout_dtype="float32", learning_rate=1e-3, optim="sgd", **options,
        )  # fmt: skip
        trainer = GRPOTrainer(model, [reward], args, rows, processing_class=chat_tokenizer(), agent=conversing)
        trainer.train()
        prompts = list(fake.prompts)
    return trainer, seen, prompts


@pytest.mark.slow
@pytest.mark.parametrize("way", rest_nightly([*WAYS][1:], ["server"]))
def test_an_agent_writes_as_over_the_native_engine(way, tmp_path):
    native, expected, _ = trained("native", tmp_path / "native")
    trainer, seen, prompts = trained(way, tmp_path / way)
    assert seen[0] == expected[0]
    logs = [line for line in trainer.state.log_history if "agents/calls" in line]
    assert all(line["agents/calls"] == 3.0 and line["agents/lost"] == 0.0 for line in logs)
    if way in AHEAD:
        assert max(line.get("staleness/max", 0) for line in trainer.state.log_history) == 1
        return
    assert seen == expected
    for one, other in zip(native.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    if way == "server":  # the second call's prompt begins with the first's and what was drawn, in token ids
        assert any(len(a) > len(b) + 5 and a[: len(b)] == b for a in prompts for b in prompts)
        assert all(line["vllm/exact"] == 1.0 for line in logs[1:])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["vllm-server", "transformers"])
def test_log_probabilities_of_a_conversation_are_a_plain_forwards(backend, tmp_path):
    model, tokenizer = tiny_llama(chat_tokenizer()), chat_tokenizer()
    prompts = [
        to_prompt({"prompt": [{"role": "user", "content": text}]}, text, text, tokenizer, {}) for text in ("a", "be")
    ]
    with FakeServer(model, tokenizer, has_digest=True) as fake:
        options = {"port": fake.port, "directory": tmp_path} if backend == "vllm-server" else {}
        inner = choose_sampler(model, tokenizer, backend=backend, **options)
        sampler = AgentSampler(inner, Agent(conversing), max_tokens=160)
        groups = list(sampler.sample(prompts, 3, SamplingParams(max_tokens=160, seed=1)))
        sampler.close()
    assert {group.prompt.uid for group in groups} == {"a", "be"}
    for one, expected in zip(
        [one for group in groups for one in group.completions],
        plain_logprobs(model, groups),
        strict=True,
    ):
        assert (~one.mask).any()
        torch.testing.assert_close(one.logprobs[one.mask], expected[one.mask], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_call_that_a_shorter_server_does_not_hold_is_refused_as_one_beyond_the_models_context(tmp_path):
    """And not asked again and again, as a fault of the server is."""
    model, tokenizer = tiny_llama(chat_tokenizer()), chat_tokenizer()
    prompt = to_prompt({"prompt": [{"role": "user", "content": "a"}]}, "a", "a", tokenizer, {})
    with FakeServer(model, tokenizer, has_digest=True) as fake:
        fake.max_model_length = 66  # its third call has 86
        inner = choose_sampler(model, tokenizer, backend="vllm-server", port=fake.port, directory=tmp_path)
        sampler = AgentSampler(inner, Agent(conversing), max_tokens=160)
        with pytest.raises(
            DataError, match="Error code: 400 - The prompt has 86 tokens, and the model's context of 66"
        ):
            list(sampler.sample([prompt], 1, SamplingParams(max_tokens=160, seed=1)))
        sampler.close()


def test_a_request_is_cut_at_its_own_limit_and_a_cancelled_one_is_dropped():
    from covey.rollout.calls import SampledScheduler
    from covey.rollout.live import LiveRequest

    model, tokenizer = tiny_llama(chat_tokenizer()), chat_tokenizer()
    scheduler = SampledScheduler(choose_sampler(model, tokenizer, backend="transformers"))
    prompt = to_prompt({"prompt": [{"role": "user", "content": "a"}]}, "0", "row", tokenizer, {})
    make = lambda key, limit: LiveRequest(prompt, (key,), limit, params=SamplingParams(max_tokens=1))
    short, long, gone = make(1, 2), make(2, 7), make(3, 7)
    for request in (short, long, gone):
        scheduler.add(request)
    done = dict(scheduler.step())
    scheduler.cancel(gone)
    while scheduler.is_busy:
        done |= dict(scheduler.step())
    assert set(done) == {short, long}
    (cut,), (whole,) = done[short].completions, done[long].completions
    assert (cut.num_tokens, cut.finish, len(cut.logprobs)) == (2, "length", 2)
    assert whole.num_tokens > 2
    alone = SampledScheduler(scheduler.sampler)
    alone.add(make(2, 7))
    ((_, group),) = alone.step()
    assert group.completions[0].token_ids.tolist() == whole.token_ids.tolist()


def test_likely_tokens_that_no_sampler_reports_are_refused():
    def asking(row, client):
        client.chat.completions.create(model="policy", messages=row["prompt"], logprobs=True, top_logprobs=3)

    model, tokenizer = tiny_llama(chat_tokenizer()), chat_tokenizer()
    sampler = AgentSampler(choose_sampler(model, tokenizer, backend="transformers"), Agent(asking), max_tokens=8)
    prompt = to_prompt({"prompt": [{"role": "user", "content": "a"}]}, "0", "row", tokenizer, {})
    with pytest.raises(DataError, match="reports no other likely tokens"):
        list(sampler.sample([prompt], 1, SamplingParams(max_tokens=8)))
    sampler.close()
