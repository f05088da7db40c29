"""A GRPO run through its own endpoint: unmodified agents with the openai client, real rollouts, real updates."""

import json
import shutil
import threading
import time

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.data.tables import column_set
from covey.errors import ConfigError, DataError, RewardError
from covey.runs import rollouts
from covey.serving import episodes_of, read_traces
from environments.acting import chat_tokenizer, tiny_llama, tiny_qwen3_5
from kit import rest_nightly

ROWS = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(4)]


def talk(client, model, row, turns=2):
    """A conversation of `turns` turns; the last text."""
    messages, said = list(row["prompt"]), ""
    for turn in range(turns):
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=6)
        said = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"more {turn}"}]
    return said


def main(row, client, model):
    """The share of the letter a: any real score will do."""
    said = talk(client, model, row)
    return len(said.encode()) % 7


def trainer_of(tmp_path, agent, rewards=None, data=None, make=tiny_llama, **given):
    chosen = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 96, "max_steps": 2}
    chosen |= {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
    }
    chosen |= {"rollout_log_steps": 1}
    args = GRPOConfig(str(tmp_path / "run"), use_cpu=True, **(chosen | given))
    tokenizer = chat_tokenizer()
    data = Dataset.from_list(ROWS) if data is None else data
    return GRPOTrainer(make(tokenizer), rewards, args, data, processing_class=tokenizer, agent=agent)


def rows_of(tmp_path, step=1):
    return rollouts.read(tmp_path / "run" / "rollouts" / f"step-{step:06d}.parquet")


def log_of(trainer):
    return next(line for line in trainer.state.log_history if "agents/lost" in line)


def events_of(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("make", rest_nightly([tiny_llama, tiny_qwen3_5], 1), ids=["attention", "layers with a state"])
def test_what_is_trained_on_are_the_tokens_of_the_calls_and_the_score_is_the_reward(tmp_path, make):
    trainer = trainer_of(tmp_path, main, make=make)
    before = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    trainer.train()
    assert any(not torch.equal(one, before[name]) for name, one in trainer.model.state_dict().items())
    logged = log_of(trainer)
    assert (logged["agents/lost"], logged["agents/calls"]) == (0.0, 2.0)
    assert logged["agents/breaks"] == 0.0  # though these random bytes, sent back as text, are other tokens
    rows, calls = rows_of(tmp_path), read_traces(tmp_path / "run" / "traces" / "step-000001.jsonl")
    assert len({call.session for call in calls}) == 8
    found = {}
    for one in episodes_of(calls, last_first=True).episodes:
        found[(*one.prompt.token_ids, *one.completion.token_ids.tolist())] = one.completion
    for row in rows:
        done = found[(*row["prompt_ids"], *row["token_ids"])]
        rest = len(row["token_ids"]) - len(done.token_ids)
        assert row["mask"] == [False] * rest + done.mask.tolist()
        assert row["logprobs"][rest:] == done.logprobs.tolist()
        assert row["reward/main"] == len(row["completion"].encode()) % 7


def test_an_answer_goes_to_the_rewards_as_the_completion_and_columns_by_name(tmp_path):
    seen = []

    def agent(row, base_url, model, api_key):
        from openai import OpenAI

        with OpenAI(base_url=base_url, api_key=api_key) as client:
            talk(client, model, row, 1)
        return {"answer": f"it is {row['answer']}", "steps": 3}

    def right(completions, answer, steps, **columns):
        seen.append((completions, answer, steps))
        return [float(one[-1]["content"].endswith(x)) for one, x in zip(completions, answer, strict=True)]

    trainer_of(tmp_path, agent, right, max_steps=1).train()
    completions, answers, steps = seen[0]
    assert completions[0] == [{"role": "assistant", "content": f"it is {answers[0]}"}]
    assert steps == [3] * 8


def test_an_answer_in_the_row_that_is_an_object_reaches_the_endpoint_as_json(tmp_path):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "the sky"}}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": {"sky": "clear"}}]
    data = {"prompt": [[*row["prompt"], *turns] for row in ROWS]}
    seen = []

    def agent(row, client, model):
        _, asks, answers = row["prompt"]
        seen.append((asks["tool_calls"][0]["function"]["arguments"], answers["content"]))
        return len(talk(client, model, row, 1))

    trainer_of(tmp_path, agent, data=column_set(data), max_steps=1).train()
    assert seen == [('{"at": "the sky"}', '{"sky": "clear"}')] * 8


@pytest.mark.nightly
def test_a_client_of_host_port_and_key_alone_is_known_by_its_key_and_may_have_an_event_loop_a_call(tmp_path):
    def agent(row, base_url, model, api_key):
        import asyncio
        from urllib.parse import urlsplit

        from openai import AsyncOpenAI

        there, messages = urlsplit(base_url), list(row["prompt"])
        client = AsyncOpenAI(base_url=f"http://{there.hostname}:{there.port}/v1", api_key=api_key, max_retries=0)
        for _ in range(2):  # as OpenEnv's harness does
            said = asyncio.run(client.chat.completions.create(model=model, messages=messages, max_tokens=6))
            messages += [
                {"role": "assistant", "content": said.choices[0].message.content},
                {"role": "user", "content": "more"},
            ]
        return len(messages[1]["content"])

    trainer = trainer_of(tmp_path, agent, max_steps=1)
    trainer.train()
    logged = log_of(trainer)
    assert (logged["agents/lost"], logged["agents/calls"], logged["agents/breaks"]) == (0.0, 2.0, 0.0)


def test_retries_are_rows_that_share_the_advantage_of_their_episode_and_no_token_counts_twice(tmp_path):
    def agent(row, client, model):
        ask = lambda messages: client.chat.completions.create(model=model, messages=messages, max_tokens=5)
        first = ask(row["prompt"]).choices[0].message.content
        more = [*row["prompt"], {"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        ask(more)
        return len(ask(more).choices[0].message.content.encode()) % 5

    trainer = trainer_of(tmp_path, agent, max_steps=1)
    trainer.train()
    assert log_of(trainer)["agents/branches"] >= 1.0
    rows = rows_of(tmp_path)
    written = sum(sum(row["mask"]) for row in rows)
    calls = read_traces(tmp_path / "run" / "traces" / "step-000001.jsonl")
    assert written == sum(one.num_tokens for call in calls for one in call.group.completions)
    for group in {row["group"] for row in rows}:
        own = [row for row in rows if row["group"] == group]
        scored = [row for row in own if row["reward"] is not None]
        assert len(scored) == 4
        known = {round(row["advantage"], 6) for row in scored}
        assert all(round(row["advantage"], 6) in known for row in own)
        assert abs(sum(row["advantage"] for row in scored)) < 1e-3


@pytest.mark.parametrize("way", ["raises", pytest.param("exits", marks=pytest.mark.nightly), "hangs"])
def test_an_agent_that_fails_loses_its_own_episode_alone(tmp_path, way):
    lock, started = threading.Lock(), []

    def agent(row, client, model):
        with lock:
            started.append(row)
            is_bad = len(started) == 3
        said = talk(client, model, row, 1)
        if is_bad and way == "raises":
            raise RuntimeError("the world broke")
        if is_bad and way == "exits":
            raise SystemExit(3)
        if is_bad:
            time.sleep(5)
        return len(said)

    limit = 1.5 if way == "hangs" else 60.0
    trainer = trainer_of(tmp_path, agent, max_steps=1, agent_timeout_seconds=limit)
    trainer.train()
    assert log_of(trainer)["agents/lost"] == 1 / 8
    assert len(rows_of(tmp_path)) == 7
    (event,) = [one for one in events_of(tmp_path) if one["kind"] == "agent_failed"]
    assert {"raises": "the world broke", "exits": "SystemExit", "hangs": "1.5 seconds"}[way] in event["said"]


def test_a_run_whose_agents_all_fail_stops_with_the_first_reason(tmp_path):
    def agent(row):
        raise KeyError("no such tool")

    with pytest.raises(DataError, match="failed in all of its 8 episodes.*no such tool"):
        trainer_of(tmp_path, agent).train()


def test_a_run_whose_agents_call_another_endpoint_stops_and_says_so(tmp_path):
    def agent(row):
        return 1.0

    with pytest.raises(DataError, match="called the run's endpoint in none of its 8 episodes.*base_url"):
        trainer_of(tmp_path, agent).train()


@pytest.mark.slow
def test_past_its_tokens_or_calls_an_episode_is_over_and_scored_as_it_is(tmp_path):
    def agent(row, client, model):
        talk(client, model, row, 50)

    counted = lambda completions, **columns: [float(len(one)) for one in completions]
    trainer_of(tmp_path / "a", agent, counted, max_steps=1).train()
    assert {row["finish"] for row in rows_of(tmp_path / "a")} == {"length"}
    trainer_of(tmp_path / "b", agent, counted, max_steps=1, max_tool_calling_iterations=1).train()
    assert {row["finish"] for row in rows_of(tmp_path / "b")} == {"turns"}
    assert all(row["reward/<lambda>"] == 3.0 for row in rows_of(tmp_path / "b"))


def test_a_trace_that_was_rendered_again_is_refused_and_an_exact_one_is_trained_on(tmp_path):
    def agent(row, client, model, seed):
        more = {"return_token_ids": True}
        said = [
            client.chat.completions.create(model=model, messages=row["prompt"], max_tokens=5, extra_body=more)
            for _ in "ab"
        ]
        turns = [
            {"prompt_token_ids": one.prompt_token_ids, "completion_token_ids": one.choices[0].token_ids} for one in said
        ]
        if seed % 2:
            turns[0]["completion_token_ids"] = [*turns[0]["completion_token_ids"], 7]
        return {"score": seed % 5, "trace": {"turns": turns[:1]}}

    trainer = trainer_of(tmp_path, agent, max_steps=1)
    trainer.train()
    lost = [one for one in events_of(tmp_path) if one["kind"] == "agent_failed"]
    assert 0 < len(lost) < 8
    assert all("rendered again" in one["said"] for one in lost)
    assert log_of(trainer)["agents/branches"] == 0.0  # one call of two was named


def test_a_file_of_traces_whose_tokens_were_changed_is_refused(tmp_path):
    trainer_of(tmp_path, main, max_steps=1).train()
    path = tmp_path / "run" / "traces" / "step-000001.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for one in span["attributes"]:
            if one["key"] == "covey.completion_token_ids":
                one["value"]["arrayValue"]["values"][0] = {"intValue": "1"}
    path.write_text(json.dumps(line))
    with pytest.raises(DataError, match="other tokens than were recorded"):
        read_traces(path)


@pytest.mark.slow
def test_agents_run_side_by_side_and_an_async_one_calls_side_by_side(tmp_path):
    together = threading.Barrier(8, timeout=30)

    async def agent(row, client, model):
        import asyncio

        together.wait()  # passes only when eight agents run at once
        ask = lambda text: client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], max_tokens=4
        )
        first, second = await asyncio.gather(ask("a"), ask("b"))
        return len(first.choices[0].message.content + second.choices[0].message.content)

    trainer = trainer_of(tmp_path, agent, max_steps=1)
    trainer.train()
    assert log_of(trainer)["agents/branches"] == 1.0


@pytest.mark.slow
def test_a_run_that_is_resumed_draws_the_same(tmp_path):
    alone = {"agent_concurrency": 1}  # one request at a time: the rows of a decode step do not depend on the clock
    whole = trainer_of(tmp_path / "a", main, max_steps=4, **alone)
    whole.train()
    half = trainer_of(tmp_path / "b", main, max_steps=4, save_strategy="steps", save_steps=2, **alone)
    half.train()
    folder = tmp_path / "b" / "run"
    shutil.rmtree(folder / "checkpoint-4")  # as if the run had ended in between
    again = trainer_of(tmp_path / "b", main, max_steps=4, save_strategy="steps", save_steps=2, **alone)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    for name, one in whole.model.state_dict().items():
        assert torch.equal(one, again.model.state_dict()[name]), name
    assert len((folder / "traces" / "step-000003.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("agent", "said"),
    [("nowhere.py:main", "nowhere.py"), (lambda world: None, "'world'"), (3, "give a function")],
)
def test_what_is_no_agent_is_refused_before_the_model_is_used(tmp_path, agent, said):
    with pytest.raises(Exception, match=said) as caught:
        trainer_of(tmp_path, agent)
    assert isinstance(caught.value, (ConfigError, OSError, ValueError))


def test_an_agent_beside_tools_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="calls its tools itself"):
        GRPOTrainer(tiny_llama(chat_tokenizer()), None, GRPOConfig(str(tmp_path)), agent=main, rollout_func=main)


def test_without_any_score_the_run_says_so(tmp_path):
    with pytest.raises(RewardError, match="returned no score, or max_completion_length ended each episode"):
        trainer_of(tmp_path, lambda row, client, model: talk(client, model, row, 1), max_steps=1).train()


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["grpo", "gigpo"])
def test_an_agent_of_two_turns_learns_from_its_rewards(tmp_path, algorithm):
    """A random model earns by letters of the first half of the alphabet, in each turn: about 0.25 at first, 2 at most."""

    def agent(row, client, model):
        messages, rewards = list(row["prompt"]), []
        for _ in range(2):
            said = (
                client.chat.completions.create(model=model, messages=messages, max_tokens=6).choices[0].message.content
            )
            rewards.append(sum(one in "abcdefghijklm" for one in said) / 6)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        return {"score": sum(rewards), "turn_rewards": rewards}

    given = {"max_steps": 25, "per_device_train_batch_size": 32, "num_generations": 8, "learning_rate": 3e-3}
    trainer = trainer_of(tmp_path, agent, algorithm=algorithm, **given)
    trainer.train()
    earned = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert sum(earned[-5:]) / 5 > sum(earned[:5]) / 5 + 0.4


def test_a_run_learns_to_predict_what_the_agent_told_the_model_and_no_turn_of_the_model(tmp_path):
    trainer = trainer_of(tmp_path, main, algorithm="grpo, regularizer=Echo(weight=1.0)", max_steps=1)
    trainer.train()
    assert 0.0 < log_of(trainer)["echo/loss"] < 20.0
    for row in rows_of(tmp_path):
        written, observed = torch.tensor(row["mask"]), torch.tensor(row["observations"])
        assert not (written & observed).any()
        between = ~written & (written.cumsum(0) > 0)
        assert torch.equal(observed, between)
        assert observed.any()


def duel(row, client, model):
    """A game of the model against itself: each player writes twice and sees the other's words; what one wins the other loses."""
    words = {"white": [], "black": []}
    for turn in range(4):
        role, other = ("white", "black") if turn % 2 == 0 else ("black", "white")
        messages = [{"role": "user", "content": f"{role}: {row['answer']}"}]
        for mine, theirs in zip(words[role], words[other][turn % 2 :], strict=False):
            messages += [{"role": "assistant", "content": mine}, {"role": "user", "content": theirs}]
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=4, user=role)
        words[role].append(reply.choices[0].message.content)
    won = float(len("".join(words["white"]).encode()) % 5) - 2.0
    return {"score": {"white": won, "black": -won}}


def test_a_game_against_itself_has_a_completion_and_an_average_for_each_role(tmp_path):
    options = {"algorithm": "dr_grpo, advantage=RoleConditioned(decay=0.5)", "num_generations": 2}
    trainer = trainer_of(tmp_path, duel, per_device_train_batch_size=4, max_steps=2, **options)
    trainer.train()
    averages, seen = {"white": 0.0, "black": 0.0}, []
    for step in (1, 2):
        rows = rows_of(tmp_path, step)
        assert [row["reward"] for row in rows[::2]] == [-row["reward"] for row in rows[1::2]]
        assert len(rows) == 8  # two rows of two games of two roles
        for row, role in zip(rows, ("white", "black") * 4, strict=True):
            assert row["advantage"] == pytest.approx(row["reward"] - averages[role], abs=1e-6)
            averages[role] = 0.5 * averages[role] + 0.5 * row["reward"]
            asked = json.loads(row["conversation"])[0]["content"]
            assert asked.startswith(role)
        seen.append(dict(averages))
    logged = [line for line in trainer.state.log_history if "advantage/white" in line]
    assert [(line["advantage/white"], line["advantage/black"]) for line in logged] == [
        (pytest.approx(each["white"]), pytest.approx(each["black"])) for each in seen
    ]
    assert any(seen[0].values())


@pytest.mark.parametrize(
    ("user", "score", "said"),
    rest_nightly(
        [
            ("grey", {"white": 1.0}, "'grey' as their user, and it has scores for white"),
            (None, {"white": 1.0}, "None as their user"),
            ("white", {"white": "much"}, "'much' as the score of white"),
            ("white", {}, "returned {} as a score"),
        ],
        2,
    ),
)
def test_a_score_by_role_that_does_not_fit_the_calls_loses_the_episode_and_says_why(tmp_path, user, score, said):
    def agent(row, client, model):
        extra = {} if user is None else {"user": user}
        client.chat.completions.create(model=model, messages=list(row["prompt"]), max_tokens=4, **extra)
        return {"score": score}

    with pytest.raises(DataError, match="failed in all of its") as caught:
        trainer_of(tmp_path, agent, max_steps=1).train()
    assert said in str(caught.value)
