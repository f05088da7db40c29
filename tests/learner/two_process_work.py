"""Steps and runs that two processes take, and one process alone."""

import os
import signal
from dataclasses import replace
from functools import lru_cache

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
        accumulate = one.accumulate

        def failing(*given):
            metrics = accumulate(*given)
            if fails and world.rank == world.size - 1 and one.micro_batcher.is_last and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory (not really).")
            return metrics

        failed = []
        one.accumulate = failing
        before = flat(one)
        report = one.step(SHARES[share](groups_of(False)), alg.dapo(), 1)
    return before - flat(one), seen, [event.kind for event in report.events]


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


def work(folder, cases):
    """What each of the two processes does, with a step of each of `cases`; it leaves `<rank>.pt` in `folder`."""
    whole = trained(folder / "whole", 2)
    world = World.of(GRPOConfig(output_dir=str(folder / "none"), use_cpu=True, bf16=False, report_to="none"))
    assert world.size == 2
    found = {
        "steps": {name: step_of(name, world) for name in cases},
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
