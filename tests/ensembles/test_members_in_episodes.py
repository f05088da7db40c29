"""Members of an ensemble write episodes: they call the run's tools, act in its environment, and answer its agent."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from zlib import crc32

import pytest
import torch
from datasets import Dataset
from endpoints import endpoint

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.ensembles import Ensemble, Member
from covey.ensembles.sampler import _joined
from covey.errors import ConfigError, DataError
from covey.runs import rollouts
from covey.types import Group, Prompt
from environments.acting import chat_tokenizer, tiny_llama, trained_on
from environments.tool_runs import CALL, add, bridge, calling, shown
from kit import completion, rest_nightly

G, K = 2, 2
ROWS = [{"prompt": [{"role": "user", "content": "q"}]}]


class Dealt:
    """An environment whose task hangs on the row's seed, and whose tool counts."""

    def reset(self, seed: int) -> str:
        self.cards, self.count = seed % 97, 0
        return f" {self.cards}"

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.count += 1
        return a + b


def playing():
    """A model that calls the tool once it has been dealt the first row's task."""
    before = shown().replace("user\nq", f"user\nq {crc32(b'0:0') % 97}")
    return trained_on(((before, CALL), (before + CALL + bridge("7"), "7<|im_end|>")), steps=250)


def agent(row, client, model, seed):
    """Two calls of whatever answers there."""
    messages = list(row["prompt"])
    for word in ("more", "end"):
        said = client.chat.completions.create(model=model, messages=messages, max_tokens=5).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": word}]
    return float(len(said.encode()) % 3)


def trainer_of(tmp_path, reward, member, role, policy=None, algorithm=None, processes=None, **given):
    options = {
        "per_device_train_batch_size": G, "num_generations": G, "max_steps": 1, "max_completion_length": 180, "optim": "sgd",
        "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "report_to": "none", "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "rollout_log_steps": 1, "logging_steps": 1,
    }  # fmt: skip
    options |= given.pop("options", {})
    tokenizer = chat_tokenizer()
    ensemble = Ensemble(
        [Member(member, role=role, samples=K, tokenizer=tokenizer, name="peer")],
        weight=alg.MemberWeight(high=1e9, drift=None),
    )
    return GRPOTrainer(
        tiny_llama(tokenizer) if policy is None else policy,
        reward,
        GRPOConfig(str(tmp_path), **options),
        Dataset.from_list(given.pop("rows", ROWS)),
        processing_class=tokenizer,
        algorithm=algorithm,
        ensemble=ensemble,
        **given,
    )


def logps(model, prompt, ids):
    """[T], log-probabilities of a completion by a plain forward pass."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def rows_of(folder, step=1):
    return rollouts.read(folder / "rollouts" / f"step-{step:06d}.parquet")


def events_of(folder):
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


EPISODES = {
    "tools": lambda: ({"tools": [add]}, calling()),
    "environment": lambda: ({"environment_factory": Dealt}, playing()),
    "agent": lambda: ({"agent": agent}, tiny_llama(chat_tokenizer(), seed=5)),
}


@pytest.mark.parametrize("kind", ["tools", pytest.param("environment", marks=pytest.mark.slow), "agent"])
def test_a_sibling_joins_with_the_gradient_of_what_it_wrote(kind, tmp_path):
    features, member = EPISODES[kind]()
    scored = []

    def reward(completions, environments=None, **columns):
        scored.append((completions, environments and [(one.cards, one.count) for one in environments]))
        return [0.0, 1.0, 1.0, 1.0]

    algorithm = alg.Algorithm(
        advantage=lambda scores: scores.per_function[..., 0] - 0.5, objective=alg.Clipped(), aggregate=alg.token_mean
    )
    trainer = trainer_of(tmp_path, reward, member, "sibling", algorithm=algorithm, **features)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    found = {name: before[name] - p.detach() for name, p in trainer.model.named_parameters()}
    rows, tokenizer = rows_of(tmp_path), chat_tokenizer()
    assert [row["source"] for row in rows] == ["policy"] * G + ["peer"] * K
    (completions, environments), answers = scored[0], []
    for row in rows:
        pairs = zip(row["token_ids"], row["mask"] or [True] * len(row["token_ids"]), strict=True)
        answers.append(tokenizer.decode([token for token, is_written in pairs if not is_written]))
    if kind == "agent":
        header = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        assert all(header.endswith(answer) and "user\nmore" in answer for answer in answers)
    else:
        assert all([message["role"] for message in turns][:2] == ["assistant", "tool"] for turns in completions[G:])
        assert bridge("7") in answers[G:]
    if kind == "environment":
        tasks, counts = zip(*environments, strict=True)
        assert len(set(tasks)) == 1
        assert tokenizer.decode(rows[0]["prompt_ids"]).count(f"user\nq {tasks[0]}<|im_end|>") == 1
        sums = lambda turns: sum(message["role"] == "tool" and message["content"] == "7" for message in turns)
        assert counts == tuple(map(sums, completions))
        assert any(counts[G:])
    fresh, loss, written = tiny_llama(tokenizer), torch.zeros(()), 0
    for i, row in enumerate(rows):
        ids, prompt = list(row["token_ids"]), list(row["prompt_ids"])
        mask = torch.ones(len(ids)) if row["mask"] is None else torch.tensor(row["mask"]).float()
        mine, advantage = logps(fresh, prompt, ids), (-0.5, 0.5, 0.5, 0.5)[i]
        weight = 1.0 if i < G else (mine - logps(member, prompt, ids)).exp().detach()
        loss, written = loss - (advantage * weight * mask * mine).sum(), written + mask.sum()
    (loss / written).backward()
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, atol=2e-6, rtol=2e-3, msg=lambda said, n=name: f"{n}: {said}"
        )


def test_a_rescuer_acts_in_the_task_that_the_policy_failed(tmp_path):
    """The observation is in its prompt once, and its seed is the policy's."""
    tasks = []

    def reward(environments, completions, **columns):
        tasks.append([one.cards for one in environments])
        return [float(one.count > 0) for one in environments]

    trainer = trainer_of(tmp_path, reward, playing(), "rescue", environment_factory=Dealt)
    trainer.train()
    rows = rows_of(tmp_path)
    assert [row["source"] for row in rows] == ["policy"] * G + ["peer"] * K
    assert [len(one) for one in tasks] == [G, K]
    assert len({task for one in tasks for task in one}) == 1
    assert chat_tokenizer().decode(rows[-1]["prompt_ids"]).count(f"q {tasks[0][0]}<|im_end|>") == 1
    assert trainer.state.log_history[0]["ensemble/peer/used"] == 1.0


def test_a_baseline_moves_the_mean_and_leaves_with_all_of_its_paths(tmp_path):
    def branching(row, client, model, seed):
        for word in ("a", "b"):
            talk = [*row["prompt"], {"role": "user", "content": word}]
            client.chat.completions.create(model=model, messages=talk, max_tokens=4)
        return 1.0

    trainer = trainer_of(tmp_path, None, tiny_llama(chat_tokenizer(), seed=5), "baseline", agent=branching)
    trainer.train()
    assert {row["source"] for row in rows_of(tmp_path)} == {"policy"}
    assert len(rows_of(tmp_path)) == 2 * G
    assert trainer.state.log_history[0]["ensemble/peer/reward"] == 1.0


@pytest.mark.parametrize("role", rest_nightly(["sibling", "rescue"], ["rescue"]))
def test_an_episode_that_a_member_cannot_write_is_left_out_and_told(role, tmp_path):
    def picky(row, client, model, seed):
        said = client.chat.completions.create(model=model, messages=row["prompt"], max_tokens=40).choices[0].message
        if "7" in said.content:
            raise RuntimeError("I wanted no seven")
        return 0.0

    member = trained_on(((shown("").split("<|im_end|>\n", 1)[1], "7<|im_end|>"),))
    trainer = trainer_of(tmp_path, None, member, role, agent=picky)
    trainer.train()
    assert {row["source"] for row in rows_of(tmp_path)} == {"policy"}
    assert trainer.state.log_history[0]["ensemble/peer/lost"] == 1.0
    told = [event["said"] for event in events_of(tmp_path) if event["kind"] == "agent_failed"]
    assert len(told) == K
    assert told[0].startswith("Ensemble member peer: An episode of agent picky")
    assert "I wanted no seven" in told[0]


def test_a_tool_of_the_environment_that_raises_is_an_answer_to_the_member_too(tmp_path):
    class Broken(Dealt):
        def add(self, a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: The first.
                b: The second.
            """
            raise ValueError("no sums today")

    read = []

    def reward(completions, **columns):
        read.extend(turns[1]["content"] for turns in completions if len(turns) > 1)
        return [1.0] * len(completions)

    trainer_of(tmp_path, reward, playing(), "sibling", environment_factory=Broken).train()
    assert read
    assert any("no sums today" in text for text in read)


def test_an_environment_that_deals_each_instance_another_task_is_refused(tmp_path):
    class Random(Dealt):
        def reset(self, **row) -> str:
            self.cards, self.count = random.random(), 0
            return f" {self.cards}"

    trainer = trainer_of(tmp_path, lambda completions, **row: [0.0] * len(completions), calling(), "sibling", environment_factory=Random)  # fmt: skip
    with pytest.raises(DataError, match="draw the task from a column of the row, or from the argument `seed`"):
        trainer.train()


def test_a_reset_that_fails_for_a_member_ends_the_run_as_for_the_policy(tmp_path):
    class Few(Dealt):
        def reset(self, seed: int) -> str:
            Few.resets = getattr(Few, "resets", 0) + 1
            if Few.resets > G:
                raise RuntimeError("no rooms left")
            return super().reset(seed)

    trainer = trainer_of(tmp_path, lambda completions, **row: [0.0] * len(completions), calling(), "rescue", environment_factory=Few)  # fmt: skip
    with pytest.raises(DataError, match="no rooms left"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:.* goes on from step 1")
@pytest.mark.parametrize("kind", rest_nightly(["environment", "agent"], 1))
def test_a_resumed_run_goes_on_as_the_whole_one(kind, tmp_path):
    features, member = EPISODES[kind]()
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(3)]

    def reward(completions, **columns):
        return [float(len(str(turns)) % 3) for turns in completions]

    options = {"max_steps": 2, "save_steps": 1, "learning_rate": 0.1, "max_completion_length": 60}
    made = lambda place: trainer_of(place, reward, member, "sibling", rows=rows, options=options, **features)
    (whole := made(tmp_path)).train()
    (again := made(tmp_path)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name, one in whole.model.state_dict().items():
        there, apart = (
            again.model.state_dict()[name],
            0.0 if kind == "environment" else 1e-6,
        )  # its calls' batches hang on time
        torch.testing.assert_close(there, one, atol=apart, rtol=0.0, msg=name)


def test_an_endpoint_cannot_write_the_runs_episodes(tmp_path):
    with endpoint(lambda body: "yes") as (url, _), pytest.raises(ConfigError, match="nor its environment or agent"):
        GRPOTrainer(
            tiny_llama(chat_tokenizer()),
            None,
            GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, num_generations=2),
            Dataset.from_list(ROWS),
            processing_class=chat_tokenizer(),
            agent=agent,
            ensemble=Ensemble([Member(url, served_model_name="m")]),
        ).train()


def test_episodes_that_begin_with_another_token_than_the_policys_are_told_as_lost():
    of_policy, theirs = (
        Group(prompt=Prompt(uid="0:3", token_ids=ids, text="q"), completions=(replace(completion(), source=source),))
        for ids, source in (((5, 6), "policy"), ((7, 6), "peer"))
    )
    group = _joined(of_policy, [theirs])
    assert [path.source for path in group.completions] == ["policy"]
    assert [event.kind for event in group.events] == ["agent_failed"]
    assert group.events[0].said.startswith("Ensemble member peer: its episodes on prompt 0:3 are lost")
