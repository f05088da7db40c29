"""Tools, environments and agents whose completions worker processes write: the draws of the synchronous run, and each environment its own task."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from covey.rollout import worker_process
from environments.acting import chat_tokenizer
from environments.tool_runs import Sum, add, calling
from forked import worker_of
from kit import rest_nightly


@pytest.fixture(autouse=True)
def _worker(monkeypatch):
    """The process that samples is a fork that has imported everything; `tests/rollout/test_asynchronous.py` starts real ones."""
    monkeypatch.setattr(worker_process, "_start", worker_of("covey.rollout.worker"))


class Marked(Sum):
    """The environment, which knows its row."""

    def reset(self, **row):
        super().reset(**row)
        self.prompt = row["prompt"]


def conversing(row, client):
    """Two calls, the second of which continues the first."""
    messages = list(row["prompt"])
    for reply in ("go on", ""):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=9)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": reply},
        ]
    return float(len(messages[-2]["content"]) % 5)


ACTING = {"tools": {"tools": [add]}, "environment": {"environment_factory": Marked}, "agent": {"agent": conversing}}


def started(folder, made_of, callbacks=None, **options):
    """The trainer of a run that samples at temperature 1, and what its reward saw."""
    seen = []

    def reward(prompts, completions, completion_ids, environments=None, **columns):
        seen.append((prompts, completion_ids))
        for environment, prompt in zip(environments or (), prompts, strict=bool(environments)):
            assert environment.prompt == prompt, "the environment was reset for another row"
        return [float(sum(ids) % 7) for ids in completion_ids]

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(12)])
    settings = {
        "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 200, "max_steps": 3, "report_to": "none",
        "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "bf16": False, "optim": "sgd",
        "gradient_checkpointing": False, "rollout_dtype": "float32", "max_tool_calling_iterations": 3, "learning_rate": 1e-2,
    }  # fmt: skip
    trainer = GRPOTrainer(
        copy.deepcopy(calling()), [reward], GRPOConfig(str(folder), **settings | options), rows, processing_class=chat_tokenizer(),
        callbacks=callbacks, eval_dataset=rows.select(range(6)) if "eval_strategy" in options else None, **ACTING[made_of],
    )  # fmt: skip
    return trainer, seen


def expect_equal(one, other, made_of):
    """Bit for bit, but for an agent: the last bits of its log-probabilities depend on which calls met in a batch."""
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6 if made_of == "agent" else 0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("made_of", rest_nightly(ACTING, ["tools", "agent"]))
def test_two_processes_draw_as_the_synchronous_run(made_of, tmp_path):
    if made_of == "agent":
        pytest.importorskip("openai")
    here, expected = started(tmp_path / "here", made_of)
    here.train()
    ahead = {"async_rollouts": True, "max_staleness": 0, "in_flight_weights": False}
    there, seen = started(tmp_path / "there", made_of, rollout_workers=2, **ahead)
    there.train()
    assert seen == expected
    expect_equal(here, there, made_of)


@pytest.mark.nightly
@pytest.mark.parametrize("made_of", ACTING)
def test_on_ray_actors_draw_as_the_synchronous_run(made_of, tmp_path):
    ray = pytest.importorskip("ray")
    here, expected = started(tmp_path / "here", made_of)
    here.train()
    there, seen = started(tmp_path / "there", made_of, async_rollouts=True, max_staleness=0, rollout_placement="ray")
    try:
        there.train()
    finally:
        ray.shutdown()
    assert seen == expected
    expect_equal(here, there, made_of)


class Kill(TrainerCallback):
    """Kills the trainer's first worker when the first step has ended."""

    trainer: GRPOTrainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer._parts.sampler._workers[0].source.worker.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("made_of", rest_nightly([*ACTING], 1))
def test_a_worker_that_is_killed_is_replaced_and_its_episodes_begin_again(made_of, tmp_path):
    here, expected = started(tmp_path / "here", made_of)
    here.train()
    kill = Kill()
    there, seen = started(tmp_path / "there", made_of, [kill], async_rollouts=True, max_staleness=0)
    kill.trainer = there
    there.train()
    assert there._parts.sampler.replaced == 1
    assert seen == expected
    expect_equal(here, there, made_of)


@pytest.mark.slow
@pytest.mark.parametrize("options", rest_nightly([{}, {"ema_decay": 0.5}], 1), ids=["policy", "average"])
def test_an_evaluation_leaves_environments_of_what_is_ahead_alone(options, tmp_path):
    trainer, seen = started(
        tmp_path, "environment", async_rollouts=True, eval_strategy="steps", eval_steps=1, num_generations_eval=2,
        per_device_eval_batch_size=2, pipeline_depth=2, max_staleness=2, **options,
    )  # fmt: skip
    trainer.train()
    assert len(seen) == 6
    rewards = [line["rewards/Marked/mean"] for line in trainer.state.log_history if "rewards/Marked/mean" in line]
    assert len(rewards) == 3
