"""Two processes take the step that one takes: the same gradients, metrics and logs, one checkpoint, an exact resume."""

import os
import signal
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.learner import Policy, Teacher, ValueHead, ValueModel
from covey.learner.packing import rows_of
from covey.process import gradient_buckets
from covey.process.gradient_buckets import GradientBuckets
from covey.process.world import World
from covey.types import Completion, Group, Prompt
from forked import Forked, free_port, rank_environment
from kit import learner_of, tiny_model, tiny_tokenizer

COMPOSED = {
    "ppo with a model of its own": alg.ppo(critic_model="separate"),
    "top entropy": alg.dapo().replace(weights=(alg.TopEntropy(0.3),)),
    "entropy bonus on top tokens": alg.grpo().replace(regularizers=alg.EntropyBonus(0.1, alg.TopEntropy(0.4))),
    "clip-cov": alg.dapo().replace(objective=alg.ClipCov(share=0.2, lower=0.0)),
    "kl-cov": alg.dapo().replace(objective=alg.KLCov(share=0.1)),
    "prompt mean": alg.dapo().replace(aggregate=alg.prompt_mean),
    "whitened weights": alg.dapo(correction=alg.Correction("token", "truncate", 2.0, normalize=True)),
    "normalized rejection": alg.dapo().replace(weights=(alg.Rejection("token_k3", 0.002),)),
}
CASES = {**{name: preset() for name, preset in alg.PRESETS.items()}, **COMPOSED}
BY_TOKEN = ("ppo", "reinforce_pp", "remax", "ppo with a model of its own")

LENGTHS = ((4, 2, 7), (3, 5, 1), (6, 2, 2, 3), (8,), (1, 5))
ADVANTAGES = ((1.0, -0.5, -0.5), (0.0, 0.0, 0.0), (-1.0, 0.4, 0.0, 0.6), (0.0,), (0.9, -0.9))
"""Two dead groups and a dead completion; 13 rows, so that shares are unequal."""


# -- one optimizer step by hand ---------------------------------------------------------------------------------------


def policy_of():
    return Policy(tiny_model("qwen2", hidden=16, dtype=torch.float64), pad_id=0)


@lru_cache
def groups_of(is_by_token):
    """Hand-made groups in float64 with everything that a preset may read, a little away from what the model says."""
    draw = torch.Generator().manual_seed(5)
    noise = lambda size, scale: scale * torch.randn(size, generator=draw, dtype=torch.float64)
    groups = []
    for number, (lengths, advantages) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        prompt = Prompt(uid=f"0:{number}", token_ids=tuple(range(5, 8 + number)))
        ids = [torch.randint(3, 200, (n,), generator=draw) for n in lengths]
        completions = [Completion(token_ids=own, text="", finish="stop") for own in ids]
        judged = torch.tensor(advantages, dtype=torch.float64)
        group = Group(prompt=prompt, completions=tuple(completions), advantages=judged)
        with torch.no_grad():
            logp = policy_of().measure(rows_of([group])).logp.double()
        known = []
        for own, completion in zip(logp, completions, strict=True):
            size = completion.num_tokens
            old = own[:size] + noise(size, 0.2)
            known.append(
                replace(
                    completion,
                    old_logp=old,
                    ref_logp=own[:size] + noise(size, 0.3),
                    logprobs=old + noise(size, 0.05),
                    values=noise(size, 0.5),
                )
            )
        longest = max(lengths)
        if is_by_token:
            judged = judged[:, None] * noise(longest, 1.0).abs()
        returns = noise((len(lengths), longest), 1.0)
        groups.append(replace(group, completions=tuple(known), advantages=judged, returns=returns))
    return tuple(_with_masks(groups))


def _with_masks(groups):
    """A completion without any token that counts, one with a gap, one that was cut at the limit."""
    first, *others = groups
    nothing, gap, cut = first.completions
    marked = (
        replace(nothing, mask=torch.zeros(nothing.num_tokens, dtype=torch.bool)),
        replace(gap, mask=torch.tensor([False, True])),
        replace(cut, finish="length"),
    )
    return [*others, replace(first, completions=marked), *others[:1]]


def teacher_of(algorithm):
    """Another model in the place of the algorithm's teacher; None if it has none."""
    if algorithm.role is None:
        return None
    terms = [part.distance for part in algorithm.regularizers if isinstance(part, alg.Distill)]
    model = tiny_model("qwen2", hidden=16, seed=9, dtype=torch.float64)
    return Teacher(Policy(model, pad_id=0), terms[0] if terms else None)


def learner_in(algorithm, world, make=torch.optim.SGD, rate=1.0):
    policy = policy_of()
    critic = None
    if algorithm.critic is not None:
        head = ValueHead(16, policy.device)
        critic = (ValueModel.of(policy) if algorithm.critic.model == "separate" else head).double()
        torch.nn.init.constant_(critic.linear.weight, 0.1)
    optimizer = make([*policy.parameters(), *(critic.parameters() if critic else [])], lr=rate)
    return learner_of(
        policy,
        optimizer,
        world=world,
        max_completion_length=8,
        max_rows=3,
        max_grad_norm=0.0,
        mask_truncated=True,
        teacher=teacher_of(algorithm),
        **({} if critic is None else {"critic": critic}),
    )


def flat(one):
    return torch.cat([p.detach().flatten() for p in one.trainable()])


def step_of(name, world):
    """The gradient of one step (what plain descent at rate 1 takes away), and what the step reported."""
    algorithm = CASES[name]
    one = learner_in(algorithm, world)
    before = flat(one)
    report = one.step(groups_of(name in BY_TOKEN), algorithm, 1)
    return before - flat(one), {key: metric.value for key, metric in report.metrics.items()}


def idle_steps_of(world):
    """Weights before and after a step of Adam, with momentum from an earlier one, in which no completion teaches."""
    one = learner_in(alg.dapo(), world, torch.optim.AdamW, 1e-2)
    one.step(groups_of(False), alg.dapo(), 1)
    before = flat(one)
    dead = [group for group in groups_of(False) if not group.advantages.any()]
    one.step(dead, alg.dapo(), 2)
    return before, flat(one)


SHARES = {
    "as they come": lambda groups: groups,
    "a rank without completions": lambda groups: [groups[1].take([0])],
    "a rank without a completion that teaches": lambda groups: [groups[1].take([0, 2])],
    "one of the groups": lambda groups: groups[1:2],
}
"""Rows go to the ranks in turn; in the third case the second rank's have no advantage."""


def float32_step_of(share, world, *, fails=False):
    """Gradient of a step in float32, buckets of which a sum had begun before the last backward ended, and all buckets.

    Buckets are small enough for several. `fails`: memory runs out on the last rank at the end of its last backward, once.
    """
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buckets, "BUCKET_BYTES", 4000)
        finish = GradientBuckets.finish
        patch.setattr(GradientBuckets, "finish", lambda own: seen.append((own._next, len(own.buckets))) or finish(own))
        policy = Policy(tiny_model("qwen2", hidden=16, layers=2), pad_id=0)
        one = learner_of(
            policy,
            torch.optim.SGD(policy.parameters(), lr=1.0),
            world=world,
            max_completion_length=8,
            max_rows=3,
            max_grad_norm=0.0,
        )
        accumulate = one._accumulate

        def failing(*given):
            metrics = accumulate(*given)
            if fails and world.rank == world.size - 1 and one.micro_batcher.is_last and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory (not really).")
            return metrics

        failed = []
        one._accumulate = failing
        before = flat(one)
        report = one.step(SHARES[share](groups_of(False)), alg.dapo(), 1)
    return before - flat(one), seen, [event.kind for event in report.events]


# -- runs of the trainer ----------------------------------------------------------------------------------------------


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer_of(folder, processes, rewards=reward, **changed):
    """3 prompts of 2 completions a step, whatever the number of processes."""
    given = {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_train_batch_size": 6 // processes,
        "num_generations": 2,
        "max_completion_length": 6,
        "loss_type": "grpo",
        "beta": 0.1,
        "optim": "sgd",
        "learning_rate": 0.5,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    prompts = ["2 + 2 =", "Tom has", "12 + 30", "What is", "Anna had 20 pens", "The answer", "How many"]
    return GRPOTrainer(
        model=tiny_model(hidden=16),
        processing_class=tiny_tokenizer(),
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=GRPOConfig(output_dir=str(folder), **{**given, **changed}),
    )


def flat_model(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(folder, processes, resume=None, **changed):
    one = trainer_of(folder, processes, **changed)
    one.train(resume_from_checkpoint=resume)
    return {"weights": flat_model(one.model), "history": one.state.log_history, "step": one.state.global_step}


def interrupted(folder, rank):
    """Only the second process is told to stop, while it scores its second rollout."""
    calls = []

    def asking(completion_ids, **columns):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return reward(completion_ids)

    one = trainer_of(folder, 2, rewards=asking, save_steps=99, max_steps=6)
    try:
        one.train()
    except SystemExit as left:  # both leave, though one alone received the signal
        history, step = one.state.log_history, one.state.global_step
        return {"weights": flat_model(one.model), "history": history, "step": step, "code": left.code}
    raise AssertionError("a run that was told to stop went on as if it had trained")


# -- the same in two processes ----------------------------------------------------------------------------------------


def work(folder):
    """What each of the two processes does; it leaves `<rank>.pt` in `folder`."""
    whole = trained(folder / "whole", 2)
    world = World.of(GRPOConfig(output_dir=str(folder / "none"), use_cpu=True, bf16=False, report_to="none"))
    assert world.size == 2
    found = {
        "steps": {name: step_of(name, world) for name in CASES},
        "idle": idle_steps_of(world),
        "float32": {share: float32_step_of(share, world) for share in SHARES},
        "spoiled": float32_step_of("as they come", world, fails=True),
        "gathered": world.gather([{"rank": world.rank, "ids": torch.arange(3 + 40 * world.rank), "text": "é"}]),
        "whole": whole,
        "resumed": trained(folder / "resumed", 2, resume=str(folder / "whole" / "checkpoint-2")),
        "interrupted": interrupted(folder / "interrupted", world.rank),
    }
    torch.save(found, folder / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


SCRIPT = """
import signal
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, str(Path(sys.argv[1]) / "learner"))
import torch
from test_two_processes import work

signal.alarm(200)  # one that hangs ends
torch.set_num_threads(1)
work(Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two processes with torchrun's environment found, by rank, and the folder they worked in."""
    folder, port = tmp_path_factory.mktemp("pair"), free_port()
    words = ["-c", SCRIPT, Path(__file__).parents[1], folder]
    ranks = [Forked(*words, env=rank_environment(rank, port)) for rank in range(2)]
    assert [rank.wait(240) for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The trainer's run in this process alone."""
    return trained(tmp_path_factory.mktemp("alone"), 1)


def apart(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("name", CASES)
def test_one_step_has_the_same_gradient_and_says_the_same(name, pair):
    (first, second), _ = pair
    expected, metrics = step_of(name, World())
    found, reported = first["steps"][name]
    assert expected.abs().max() > 0
    assert torch.equal(found, second["steps"][name][0]), "both processes end with the same weights"
    assert apart(found, expected) <= 1e-6
    assert set(reported) == set(metrics)
    for key, value in metrics.items():
        assert reported[key] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), key


@pytest.mark.parametrize("share", SHARES)
def test_sums_that_begin_in_the_backward_pass_are_those_of_one_process(share, pair):
    (first, second), _ = pair
    expected, _, _ = float32_step_of(share, World())
    found, seen, _ = first["float32"][share]
    assert torch.equal(found, second["float32"][share][0])
    assert apart(found, expected) <= 1e-6
    ((begun, buckets),) = seen
    assert buckets > 3
    assert begun > 3, "the first rank had a backward pass, in which sums began"


def test_memory_that_runs_out_after_a_sum_has_begun_repeats_the_step_on_every_process(pair):
    (first, second), _ = pair
    expected, _, _ = float32_step_of("as they come", World())
    for found, seen, events in (first["spoiled"], second["spoiled"]):
        assert apart(found, expected) <= 1e-6
        assert [begun > 0 for begun, _ in seen] == [True, False], (
            "the second time sums begin after the last micro-batch"
        )
        assert len(events) <= 1
    assert second["spoiled"][2] == ["out_of_memory"]
    assert torch.equal(first["spoiled"][0], second["spoiled"][0])


def test_values_of_unequal_length_are_gathered_in_the_order_of_ranks(pair):
    for found in pair[0]:
        assert [[one["rank"] for one in part] for part in found["gathered"]] == [[0], [1]]
        assert [[one["ids"].tolist() for one in part] for part in found["gathered"]] == [[[0, 1, 2]], [list(range(43))]]


def test_a_step_in_which_nothing_teaches_leaves_the_weights_alone_in_both(pair):
    before, after = idle_steps_of(World())
    assert torch.equal(before, after)
    for found in pair[0]:
        assert torch.equal(*found["idle"])


def test_a_run_ends_with_the_same_weights(pair, alone):
    (first, second), _ = pair
    assert apart(alone["weights"], flat_model(tiny_model(hidden=16))) > 1e-3, "it has learnt something"
    assert apart(first["whole"]["weights"], alone["weights"]) <= 1e-5
    assert torch.equal(first["whole"]["weights"], second["whole"]["weights"])


def test_a_run_logs_the_same_history(pair, alone):
    for found in pair[0]:
        history = found["whole"]["history"]
        assert len(history) == len(alone["history"]) == 4  # 3 steps and the summary
        for entry, expected in zip(history[:3], alone["history"][:3], strict=True):
            assert set(entry) == set(expected)
            for exact in ("reward", "reward_std", "completions/mean_length", "num_tokens", "epoch", "step"):
                assert entry[exact] == expected[exact], exact
            measured = {key for key in entry if not key.startswith("memory/")} - {"step_time", "rewards/reward/seconds"}
            near = lambda value: value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True)
            for key in measured:
                assert entry[key] == near(expected[key]), key
        assert len({entry["reward"] for entry in history[:3]}) > 1


def test_a_run_is_written_down_once(pair):
    _, folder = pair
    saved = sorted(path.name for path in (folder / "whole").glob("checkpoint-*"))
    assert saved == ["checkpoint-2", "checkpoint-3"], "one of each, and the last step's"
    assert len((folder / "whole" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(pair):
    for found in pair[0]:
        assert found["resumed"]["step"] == 3
        assert torch.equal(found["resumed"]["weights"], found["whole"]["weights"])
        assert found["resumed"]["history"][2]["reward"] == found["whole"]["history"][2]["reward"]


def test_a_signal_to_one_process_stops_both_at_the_same_step_with_a_checkpoint(pair):
    (first, second), folder = pair
    assert first["interrupted"]["step"] == second["interrupted"]["step"] == 1  # the second was left in the middle
    assert torch.equal(first["interrupted"]["weights"], second["interrupted"]["weights"])
    assert [path.name for path in (folder / "interrupted").glob("checkpoint-*")] == ["checkpoint-1"]
