"""What `test_context_parallel.py` has each of two or four processes do with rows that they share out, and one process with whole ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import sharded_cases
from two_process_work import BY_TOKEN, CASES, groups_of, policy_of, teacher_of

from covey import GRPOConfig
from covey import algorithms as alg
from covey.learner import Policy, Teacher, context_parallel
from covey.learner.teacher import Member, Teachers
from covey.process.context import ContextGroup
from covey.process.sharding import Sharding, whole, whole_state
from covey.process.world import World
from covey.training.build_learner import networks_of
from covey.types import Completion, Group
from expert_models import expert_model
from kit import learner_of, tiny_model
from modalities.media_prompts import prompts, tiny_of

PRESETS = list(CASES)
SEPARATE = "ppo with a model of its own"
QUICK_PRESETS = ["grpo", "gspo", "ppo", SEPARATE, "clip-cov", "prompt mean", "sdar", "iw_opd", "opsd"]
MODELS = {
    "sliding window": ("mistral", {"sliding_window": 3, "layers": 2}),
    "window by layer, soft cap": ("gemma2", {"sliding_window": 4, "layers": 2}),
    "one key head": ("llama", {"layers": 2}),
    "four heads, two key heads": ("qwen3", {"layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "tied, learnt positions": ("gpt2", {"layers": 2}),
}


def shared_out(policy, world):
    """The policy as a run makes it, whose processes share out each row, where there are several."""
    return policy if world.size == 1 else replace(policy, context=ContextGroup(world), packs_always=True)


def learner_in(algorithm, policy, world, sharding, teacher=None):
    """A learner at rate 1."""
    policy = shared_out(policy, world)
    if teacher is None and algorithm.role is not None:
        whole_rows = teacher_of(algorithm)
        teacher = replace(whole_rows, policy=shared_out(whole_rows.policy, world))
    networks = networks_of(algorithm, policy, world, sharding, None)
    critic = networks.critic
    if hasattr(critic, "linear"):
        critic.linear.double()
        torch.nn.init.constant_(critic.linear.weight, 0.1)
    return learner_of(
        networks.policy,
        torch.optim.SGD([*networks.policy.parameters(), *critic.parameters()], lr=1.0),
        world=world,
        critic=critic,
        reference=networks.reference,
        max_completion_length=8,
        max_rows=3,
        max_grad_norm=0.0,
        mask_truncated=True,
        overlaps_reduction=sharding is None,
        teacher=teacher,
    )


def step_of(algorithm, policy, groups, world, sharding=None, teacher=None):
    """The gradient of one step and what it reported."""
    learner = learner_in(algorithm, policy, world, sharding, teacher)
    flat = lambda: torch.cat([whole(p.detach()).flatten().clone() for p in learner.trainable()])
    before = flat()
    report = learner.step(groups, algorithm, 1)
    return before - flat(), {key: metric.value for key, metric in report.metrics.items()}


def preset(name, world, sharding=None):
    return step_of(CASES[name], policy_of(), groups_of(name in BY_TOKEN), world, sharding)


def model(name, world, sharding=None):
    kind, shape = MODELS[name]
    policy = Policy(tiny_model(kind, dtype=torch.float64, **shape), pad_id=0)
    return step_of(alg.grpo(kl=alg.KL(coefficient=0.1)), policy, groups_of(False), world, sharding)


def experts(is_replayed, world):
    """A step of a model with experts and its load-balancing loss: with the routers' own choices, or with other ones replayed."""
    made = expert_model("Qwen3Moe", torch.float64, vocab_size=200)
    made.set_experts_implementation("eager")  # the grouped product has no float64
    options = {"auxiliary_coefficient": 0.5, "replays_experts": is_replayed}
    groups = groups_of(False)
    if is_replayed:
        draw = torch.Generator().manual_seed(5)
        chosen = lambda tokens: torch.rand(tokens, 2, 8, generator=draw).topk(2).indices.to(torch.uint8)
        groups = [replace(group, completions=with_choices(group, chosen)) for group in groups]
    return step_of(alg.grpo(kl=alg.KL(coefficient=0.1)), Policy(made, pad_id=0, **options), groups, world)


def with_choices(group, chosen):
    """The completions with these experts, which they share where they read the prompt."""
    *read, last = chosen(len(group.prompt.token_ids)).split(1)
    read = torch.cat(read)
    of = lambda tokens: torch.cat([last, chosen(tokens)[1:]])
    return tuple(replace(one, experts=of(one.num_tokens), prompt_experts=read) for one in group.completions)


def model_that_teaches(heads, seed):
    shape = {"hidden": 16, "num_attention_heads": heads, "num_key_value_heads": heads}
    return Policy(tiny_model("qwen2", seed=seed, dtype=torch.float64, **shape), pad_id=0)


def teacher(name, world):
    """The step that learns from a teacher: `names`, each in the place of `distill`."""
    term = alg.distill("another")
    learnt, policy = alg.grpo().replace(regularizers=(term,)), policy_of()
    groups = [
        replace(group, prompt=replace(group.prompt, columns={"k": str(i % 2)}))
        for i, group in enumerate(groups_of(False))
    ]
    made = lambda heads, seed=9: Teacher(shared_out(model_that_teaches(heads, seed), world), term.distance)
    if name == "shared out":
        chosen = made(2)
    elif name == "whole rows":
        chosen = made(1)
    elif name == "hints":
        hints = lambda group: [None if i % 2 else "more" for i in range(group.size)]
        hinted = lambda prompt, hint: (*prompt.token_ids, 7, 9, 11)
        chosen = replace(made(2), hints=hints, hinted=hinted, entropy_sensitivity=0.5, overlap_k=3)
    else:
        chosen = Teachers((Member(made(2), value="0"), Member(made(1, 11), value="1")), by="k")
    return step_of(learnt, policy, groups, world, teacher=chosen)


TEACHERS = ("shared out", "whole rows", "hints", "one by column")


def single(world, checkpoints=False):
    """One completion of a prompt, in float32: fewer tokens that predict something than processes."""
    made = tiny_model("qwen2", hidden=16, layers=2)
    if checkpoints:
        from covey.learner.preparation import checkpoint_activations

        checkpoint_activations(made)
        made.train()
    return step_of(alg.dapo(), Policy(made, pad_id=0), [groups_of(False)[1].take([0])], world)


MEDIA = ("qwen2_5_vl", "qwen2_audio", "llava", "qwen2_5_omni")
QUICK_MEDIA = MEDIA[:2]


def media(kind, world, sharding=None):
    """A step on prompts with an item, with two and with none, in groups of unequal size; the towers learn too."""
    model, processor = tiny_of(kind)
    policy = Policy(model.double(), pad_id=processor.tokenizer.pad_token_id)
    draw, groups = torch.Generator().manual_seed(3), []
    for prompt, lengths in zip(prompts(processor, kind), ((4, 2, 7), (5, 1), (6, 3), (2, 2)), strict=False):
        ids = [torch.randint(3, 200, (n,), generator=draw) for n in lengths]
        judged = torch.linspace(-1.0, 1.0, len(lengths), dtype=torch.float64)
        completions = tuple(
            Completion(token_ids=own, text="", finish="stop", ref_logp=torch.full((len(own),), -5.0).double())
            for own in ids
        )
        groups.append(Group(prompt=prompt, completions=completions, advantages=judged))
    policy = shared_out(policy, world)
    context_parallel.expect_media(policy, groups[0].prompt)
    return step_of(alg.grpo(kl=alg.KL(coefficient=0.1)), policy, groups, world, sharding)


def trained(folder, processes, **changed):
    """A run of the trainer: weights, and what it logged."""
    torch.manual_seed(0)  # of the adapter
    one = sharded_cases.trainer_of(folder, processes, **{"fsdp": None, "save_strategy": "no", **changed})
    one.train()
    weights = sorted(whole_state(one.model).items())
    return {
        "weights": torch.cat([value.flatten().double() for _, value in weights]),
        "history": one.state.log_history,
        "context": one._parts.learner.world.context,
    }


RUNS = {
    "plain": {},
    "checkpointed adapter": {"peft": True, "gradient_checkpointing": True},
    "split": {"fsdp": True},
    "replayed experts": {"model": sharded_cases.experts, "router_replay": "R3", "learning_rate": 0.05},
    "full KL": {"algorithm": lambda: alg.grpo(kl=alg.KL(alg.full, 0.1))},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
}


def work(folder, which):
    args = GRPOConfig(str(folder / "none"), use_cpu=True, report_to="none")
    world = World.of(args)
    pair = replace(world, context=2)
    done = {}
    if which == "quick":
        done["presets"] = {name: preset(name, pair) for name in QUICK_PRESETS}
        done["models"] = {name: model(name, pair) for name in MODELS}
        done["split"] = {name: preset(name, pair, Sharding()) for name in ("grpo", "ppo", SEPARATE)}
        done["teachers"] = {name: teacher(name, pair) for name in TEACHERS}
        done["media"] = {kind: media(kind, pair) for kind in QUICK_MEDIA}
        done["experts"] = {is_replayed: experts(is_replayed, pair) for is_replayed in (False, True)}
        done["single"] = {again: single(pair, again) for again in (False, True)}
        done["runs"] = {
            name: trained(folder / name, 2, parallelism_config={"cp_size": 2}, **RUNS[name])
            for name in ("plain", "split")
        }
    if which == "every":
        done["presets"] = {name: preset(name, pair) for name in PRESETS}
        done["media"] = {kind: media(kind, pair) for kind in MEDIA}
        done["runs"] = {
            name: trained(folder / name, 2, parallelism_config={"cp_size": 2}, **RUNS[name]) for name in RUNS
        }
    if which == "four":
        done["presets"] = {name: preset(name, pair) for name in ("grpo", "ppo")}
        done["split"] = {name: preset(name, pair, Sharding()) for name in ("grpo",)}
        done["experts"] = {True: experts(True, pair)}
        done["media"] = {kind: media(kind, pair, Sharding()) for kind in QUICK_MEDIA}
    torch.save(done, folder / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import signal

    signal.alarm(300)  # one that hangs ends
    torch.set_num_threads(1)
    work(Path(sys.argv[1]), sys.argv[2])
