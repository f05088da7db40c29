"""Tools and environments over a vLLM server, also ahead: token ids in and out, exact log-probabilities, the template applied once."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.rollout.agreement import plain_logprobs
from environments.acting import chat_tokenizer
from environments.tool_runs import Sum, add, bridge, calling, shown
from kit import rest_nightly
from vllm_server.fake_server import FakeServer

WAYS = {
    "native": {},
    "server": {"use_vllm": True, "vllm_mode": "server"},
    "ahead": {"use_vllm": True, "vllm_mode": "server", "async_rollouts": True, "in_flight_weights": False},
    "transformers": {"rollout_backend": "transformers"},
    "process": {"async_rollouts": True, "max_staleness": 0},
    "processes": {"async_rollouts": True, "max_staleness": 0, "rollout_workers": 2},
    "process ahead": {
        "async_rollouts": True,
        "in_flight_weights": False,
    },  # else a slow machine writes with the newest ones
    "transformers in a process": {"async_rollouts": True, "max_staleness": 0, "rollout_backend": "transformers"},
}
AHEAD = ("ahead", "process ahead")


def as_scored(scores):
    """Advantages that are the rewards: equal completions of a group move the weights too."""
    return scores.total


def trained(way, folder, **made_of):
    model, seen = calling(steps=60), []
    start = [weight.detach().clone() for weight in model.parameters()]

    def reward(completions, **columns):
        seen.append((completions, columns))
        return [float(i % 4) for i in range(len(completions))]

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}]}] * 12)
    with FakeServer(model, chat_tokenizer(), has_digest=True) as fake:
        options = WAYS[way] | ({"vllm_server_port": fake.port} if "use_vllm" in WAYS[way] else {})
        args = GRPOConfig(
            str(folder), per_device_train_batch_size=4, num_generations=4, max_completion_length=256, max_steps=3, report_to="none",
            disable_tqdm=True, logging_steps=1, save_strategy="no", generation_kwargs={"do_sample": False}, learning_rate=0.03, optim="sgd", max_grad_norm=0.0, use_cpu=True, bf16=False,
            gradient_checkpointing=False, rollout_dtype="float32", max_tool_calling_iterations=3, **options,
        )  # fmt: skip
        made_of = {"algorithm": alg.dapo().replace(advantage=as_scored), **made_of}
        trainer = GRPOTrainer(model, [reward], args, rows, processing_class=chat_tokenizer(), **made_of)
        trainer.train()
        asked = list(fake.prompts)
    with torch.no_grad():
        assert (
            max(float((now - before).abs().max()) for now, before in zip(model.parameters(), start, strict=True)) > 1e-3
        )
    return trainer, seen, asked


@pytest.mark.slow
@pytest.mark.parametrize("way", rest_nightly([*WAYS][1:], ["server"]))
def test_a_tool_is_called_as_by_the_native_engine(way, tmp_path):
    native, expected, _ = trained("native", tmp_path / "native", tools=[add])
    trainer, seen, asked = trained(way, tmp_path / way, tools=[add])
    assert [one[0] for one in seen] == [one[0] for one in expected]
    assert seen[0][0][0][1] == {"role": "tool", "name": "add", "content": "7"}
    logs = [line for line in trainer.state.log_history if "tools/call_frequency" in line]
    assert all(line["tools/call_frequency"] == 1.0 and line["tools/failure_frequency"] == 0.0 for line in logs)
    gaps = [line["sampling/sampling_logp_difference/max"] for line in logs]
    if way in AHEAD:
        assert max(line.get("staleness/max", 0) for line in trainer.state.log_history) == 1
        assert min(gaps[1:]) > 1e-3  # so much is between the weights of two steps
        return
    assert max(gaps) < 1e-5
    for one, other in zip(native.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    if way == "server":  # the second turn's prompt is the first's with what was written and the reply, in token ids
        tokenizer = chat_tokenizer()
        assert {tokenizer.decode(ids) for ids in asked} >= {shown()}
        longer = [ids for ids in asked if tokenizer.decode(ids).endswith(bridge("7"))]
        assert longer
        assert all(ids[: len(tokenizer(shown())["input_ids"])] == tokenizer(shown())["input_ids"] for ids in longer)


@pytest.mark.slow
@pytest.mark.parametrize("way", rest_nightly(["ahead", "server", "processes", "process ahead"], 1))
def test_an_environment_scores_its_own_episode(way, tmp_path):
    trainer, seen, _ = trained(way, tmp_path, environment_factory=Sum)
    assert all([one.calls for one in columns["environments"]] == [[(3, 4)]] * 4 for _, columns in seen)
    rewards = [line["rewards/Sum/mean"] for line in trainer.state.log_history if "rewards/Sum/mean" in line]
    assert rewards == [1.0] * 3


class Shown(Sum):
    """The same environment, whose prompt `reset` writes."""

    def reset(self, **row):
        super().reset(**row)
        return " and more"


@pytest.mark.nightly
def test_a_prompt_that_reset_wrote_is_learnt_from_ahead_too(tmp_path, monkeypatch):
    from covey.learner import Policy

    learnt, measure = [], Policy.measure

    def measured(self, rows, *parts, **options):
        learnt.extend(tuple(row.prompt.token_ids) for row in rows)
        return measure(self, rows, *parts, **options)

    monkeypatch.setattr(Policy, "measure", measured)
    _, _, prompts = trained("ahead", tmp_path, environment_factory=Shown)
    assert learnt
    assert set(learnt) <= {tuple(ids) for ids in prompts}
    assert all("and more" in chat_tokenizer().decode(ids) for ids in learnt)


@pytest.mark.slow
def test_log_probabilities_over_a_server_are_a_plain_forwards(tmp_path):
    from covey.data.prompts import to_prompt
    from covey.environments import Episodes, EpisodeSampler, Template, tools_of
    from covey.rollout import SamplingParams, choose_sampler

    model, tokenizer = calling(), chat_tokenizer()
    with FakeServer(model, tokenizer, has_digest=True) as fake:
        make = lambda hook: choose_sampler(
            model, tokenizer, backend="vllm-server", environment=hook, port=fake.port, directory=tmp_path
        )
        tools = tools_of([add])
        template = {"tools": [one.schema for one in tools]}
        episodes = Episodes(Template(tokenizer, [tokenizer.eos_token_id], template), tools)
        prompt = to_prompt({"prompt": [{"role": "user", "content": "q"}]}, "0", "row 0", tokenizer, template)
        params = SamplingParams(max_tokens=200, temperature=0.0)
        (group,) = EpisodeSampler(make, episodes).sample([prompt], 2, params)
    for one, expected in zip(group.completions, plain_logprobs(model, [group]), strict=True):
        assert (~one.mask).any()
        torch.testing.assert_close(one.logprobs[one.mask], expected[one.mask], atol=1e-4, rtol=0)
