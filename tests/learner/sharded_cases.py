"""What `test_sharded.py` has each of two processes do with a model that is split, and one process with a whole one."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from two_process_work import BY_TOKEN, CASES, SHARES, groups_of, policy_of, reward, teacher_of

from covey import GRPOConfig, GRPOTrainer, SFTTrainer, sft_config
from covey import algorithms as alg
from covey.adapters import expert_parameters
from covey.learner import Policy
from covey.learner.memory_estimate import CPU_TOKENS
from covey.learner.optimizer import LossScaler
from covey.process.sharding import Sharding, is_sharded, local, whole, whole_state
from covey.process.world import World
from covey.rollout import GatheredSampler, NativeSampler, SamplingParams
from covey.training.build_learner import networks_of
from expert_models import expert_model
from kit import learner_of, prompt, tiny_model, tiny_tokenizer
from rollout.causal_classes import build

HOW = Sharding()


# -- one optimizer step by hand -------------------------------------------------------------------------------------------


def learner_in(algorithm, world, policy):
    """A learner at rate 1 over a policy that is split where there are several processes; a critic as `test_two_processes` has it."""
    networks = networks_of(algorithm, policy, world, HOW, None)
    policy, critic = networks.policy, networks.critic
    if hasattr(critic, "linear"):
        critic.linear.double()
        torch.nn.init.constant_(critic.linear.weight, 0.1)
    parameters = [*policy.parameters(), *critic.parameters()]
    return learner_of(
        policy,
        torch.optim.SGD(parameters, lr=1.0),
        world=world,
        critic=critic,
        reference=networks.reference,
        max_completion_length=8,
        max_rows=3,
        max_grad_norm=0.0,
        mask_truncated=True,
        overlaps_reduction=False,
        teacher=teacher_of(algorithm),
    )


def flat(parameters):
    return torch.cat([whole(p.detach()).flatten().clone() for p in parameters])


def step_of(algorithm, world, policy, groups):
    """The gradient of one step (what plain descent at rate 1 takes away), and what the step reported."""
    one = learner_in(algorithm, world, policy)
    before = flat(one.trainable())
    report = one.step(groups, algorithm, 1)
    return before - flat(one.trainable()), {key: metric.value for key, metric in report.metrics.items()}


def case_of(name, world):
    return step_of(CASES[name], world, policy_of(), groups_of(name in BY_TOKEN))


def share_of(share, world):
    policy = Policy(tiny_model("qwen2", hidden=16, layers=2), pad_id=0)
    return step_of(alg.dapo(), world, policy, SHARES[share](groups_of(False)))[0]


def tied_of(world):
    """Weights before and after a step of Adam, with momentum from an earlier one, in which no completion teaches."""
    one = learner_in(alg.dapo(), world, policy_of())
    one.optimizer = torch.optim.AdamW(one.policy.parameters(), lr=1e-2)
    one.step(groups_of(False), alg.dapo(), 1)
    before = flat(one.trainable())
    one.step([group for group in groups_of(False) if not group.advantages.any()], alg.dapo(), 2)
    return before, flat(one.trainable())


SCALED = ("grpo", "ppo", "ppo with a model of its own")


def scaled_of(name, world):
    """The gradient of one step whose loss is scaled by a power of two, and of one that overflows on the last process; scales after."""
    gradients, scales = [], []
    for overflows in (False, True):
        one = learner_in(CASES[name], world, policy_of())
        one.scaler = LossScaler("cpu")
        if overflows and world.rank == world.size - 1:
            one.backward = partial(overflowing, one, one.backward)
        before = flat(one.trainable())
        one.step(groups_of(name in BY_TOKEN), CASES[name], 1)
        gradients.append(before - flat(one.trainable()))
        scales.append(one.scaler.get_scale())
    return gradients, scales


def overflowing(learner, backward, loss):
    backward(loss)
    local(learner.policy.parameters()[0].grad).view(-1)[0] = torch.inf


# -- runs of the trainer ----------------------------------------------------------------------------------------------------

LONG = "a prompt that is much longer than all of the others, so that it takes a forward pass of its own"
PROMPTS = ["2 + 2 =", "Tom has", LONG, "12 + 30", "What is", "Anna had 20 pens", "The answer", "How many"]
SAVED = {"save_strategy": "steps", "save_steps": 2}
RUNS = {
    "plain": {},
    "kept for the backward": {"fsdp_config": {"reshard_after_forward": False}, "max_grad_norm": 0.05},
    "the model as one": {"fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
    "checkpointed": {"fsdp_config": {"activation_checkpointing": True}, "max_tokens_per_microbatch": 60},
    "full KL": {"algorithm": lambda: alg.grpo(kl=alg.KL(alg.full, 0.1))},
    "moving reference": {**SAVED, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "value head": {"algorithm": alg.ppo},
    "a teacher by token": {"algorithm": alg.rlsd},
    "a teacher that is an average": {**SAVED, "algorithm": lambda: alg.sdft(feedback="best", teacher_update_rate=0.3)},
    "a teacher of the start": {**SAVED, "algorithm": lambda: alg.opsd(feedback="best")},
    "an adapter's average": {
        **SAVED,
        "peft": True,
        "algorithm": lambda: alg.sdft(feedback="best", teacher_update_rate=0.3),
    },
    "teachers by a column": {"algorithm": lambda: alg.mopd(teacher=teachers(), by="kind")},
    "divergences of teachers by a column": {"algorithm": lambda: by_divergence()},
    "value model": {**SAVED, "algorithm": lambda: alg.ppo(critic_model="separate")},
    "adapter": {**SAVED, "peft": True},
    "an adapter on embeddings": {
        **SAVED,
        "model": lambda: tiny_model(hidden=16, layers=2, tie_word_embeddings=False),
        "peft": {"target_modules": ["q_proj", "embed_tokens"]},
    },
    "offloaded": {**SAVED, "fsdp": "full_shard auto_wrap offload", "max_grad_norm": 0.05},
    "layers with a state": {"model": lambda: build("qwen3_5_text")},
    "an adapter on layers with a state": {
        **SAVED,
        "model": lambda: build("granitemoehybrid"),
        "peft": True,
        "learning_rate": 0.05,  # at 0.5 the weights move by a third a step, and roundings grow
    },
    "routing replay": {"model": lambda: experts(), "router_replay": "R3"},
    "an adapter on experts": {**SAVED, "model": lambda: experts(), "peft": True},
    "ZeRO-2 by DeepSpeed's file": {"fsdp": None, "deepspeed": {"zero_optimization": {"stage": 2}}},
}


def experts():
    """A mixture of experts; its adapter goes on the experts too."""
    return expert_model("Qwen3Moe", vocab_size=len(tiny_tokenizer()), num_experts_per_tok=1)


KINDS = ["a", "b", "a", "none", "b", "b", "a", "none"]
"""Of each prompt, its teacher: a step of three prompts has those of one process without a teacher of the other's."""


def teachers():
    """Two models that a column chooses from."""
    return {name: tiny_model(hidden=16, layers=2, seed=seed) for name, seed in (("a", 7), ("b", 8))}


def by_divergence():
    return alg.dapo().replace(objective=alg.zero, regularizers=alg.distill(teachers(), by="kind"))


def trainer_of(folder, processes, *, algorithm=None, peft=False, model=None, **changed):
    """3 prompts of 2 completions a step, whatever the number of processes."""
    from peft import LoraConfig

    given = {
        "max_steps": 3,
        "save_strategy": "no",
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
        "rollout_dtype": "float32",
        "report_to": "none",
        "disable_tqdm": True,
        "fsdp": True,
    }
    if algorithm is not None:
        given = {name: value for name, value in given.items() if name not in ("loss_type", "beta")}
    built = tiny_model(hidden=16, layers=2) if model is None else model()
    adapter = {"target_modules": "all-linear", "target_parameters": expert_parameters(built) or None}
    adapter |= peft if isinstance(peft, dict) else {}
    return GRPOTrainer(
        model=built,
        processing_class=tiny_tokenizer(),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS, "kind": KINDS}),
        args=GRPOConfig(output_dir=str(folder), **{**given, **changed}),
        algorithm=None if algorithm is None else algorithm(),
        peft_config=LoraConfig(r=2, init_lora_weights=False, **adapter) if peft else None,
    )


def trained(folder, processes, resume=None, **changed):
    torch.manual_seed(0)  # of the adapter
    one = trainer_of(folder, processes, **changed)
    one.train(resume_from_checkpoint=resume)
    weights = whole_state(one.model)
    return {
        "weights": torch.cat([value.flatten().double() for name, value in sorted(weights.items())]),
        "history": one.state.log_history,
        "split": sum(is_sharded(p) for p in one.model.parameters()),
        "held": sum(local(p).numel() for p in one.model.parameters()) / sum(p.numel() for p in one.model.parameters()),
        "sampler": type(one._parts.sampler.sampler).__name__ if processes > 1 else "",
    }


EXAMPLES = [{"prompt": text, "completion": f" {len(text)}"} for text in PROMPTS]


def learnt(folder, processes):
    """Weights after two steps of supervised fine-tuning on four examples each, and bytes of the plain copy that are held."""
    args = sft_config(
        output_dir=str(folder), per_device_train_batch_size=4 // processes, max_steps=2, learning_rate=0.1, optim="sgd",
        save_strategy="no", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, fsdp=True,
    )  # fmt: skip
    one = SFTTrainer(
        tiny_model(hidden=16, layers=2), args, Dataset.from_list(EXAMPLES), processing_class=tiny_tokenizer()
    )
    one.train()
    shards = one._parts.learner.policy.shards
    held = 0 if shards is None else sum(p.untyped_storage().nbytes() for p in shards.whole.parameters())
    return flat(one.model.parameters()), held


# -- the sampler --------------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts what processes say to each other."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def sampled(world):
    """Texts and collectives of rollouts of 2 and of 20 tokens, as the rank without prompts sees them too; bytes held after."""
    policy = Policy(tiny_model("qwen2", hidden=16, layers=2), pad_id=0)
    policy = networks_of(alg.dapo(), policy, world, HOW, None).policy
    one = GatheredSampler(policy.shards, lambda model: NativeSampler(model, tiny_tokenizer(), dtype="float32"))
    before = held(policy)
    found = []
    for tokens in (2, 20):
        one.load(policy.model, version=1)
        given = [prompt("2 + 2 =")] if world.is_main else []
        with Collectives() as collectives:
            groups = list(one.sample(given, 3, SamplingParams(max_tokens=tokens, seed=1)))
        found.append((collectives.count, [c.text for group in groups for c in group.completions]))
    return {"found": found, "held": (before, held(policy)), "parts": len(policy.shards._parts())}


def held(policy):
    """Bytes of weights on this process: its parts, and whatever is gathered."""
    everything = [*policy.model.parameters(), *policy.shards.whole.parameters()]
    return sum(local(p).untyped_storage().nbytes() for p in everything)


def sampled_alone():
    one = NativeSampler(tiny_model("qwen2", hidden=16, layers=2), tiny_tokenizer(), dtype="float32")
    groups = [g for n in (2, 20) for g in one.sample([prompt("2 + 2 =")], 3, SamplingParams(max_tokens=n, seed=1))]
    return [[c.text for c in group.completions] for group in groups]


# -- checkpoints ----------------------------------------------------------------------------------------------------------------

STEPS = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "rollout_log_steps": 1,
}
"""A run of six steps with a state of the optimizer, and a checkpoint at every second one."""


def resumed(name, folder):
    """The last step of a run again, from the checkpoint before it, with a token limit that is given: no pass measures it."""
    start = folder / name / "checkpoint-2"
    given = {"max_tokens_per_microbatch": CPU_TOKENS, **RUNS[name]}
    return trained(folder / f"{name} again", 2, resume=str(start), **given)


def in_legs(folder):
    """The middle leg of a run that one process began, and all of a run by two with its last leg done again."""
    one = folder / "one"
    return {
        "middle": trained(one, 2, resume=str(one / "checkpoint-2"), **{**STEPS, "max_steps": 4}),
        "unbroken": trained(folder / "two", 2, **STEPS),
        "again": trained(folder / "again", 2, resume=str(folder / "two" / "checkpoint-4"), **STEPS),
    }


def last_leg(folder):
    """What two processes do after one has left a checkpoint of the fourth step in `folder`; each leaves `<rank>.pt` there."""
    found = trained(folder / "last", 2, resume=str(folder / "checkpoint-4"), **STEPS)
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


def drawn(folder):
    """Prompts and completions of each step, from the run folder."""
    import pyarrow.parquet as parquet

    files = sorted((folder / "rollouts").glob("*.parquet"))
    return [[(str(row["prompt"]), row["completion"]) for row in parquet.read_table(file).to_pylist()] for file in files]


# -- all of it ------------------------------------------------------------------------------------------------------------------

QUICK_CASES = ("grpo", "gspo", "rlsd", "otb", "kl-cov", "ppo with a model of its own")
QUICK_RUNS = (
    "adapter",
    "an adapter on embeddings",
    "a teacher by token",
    "a teacher that is an average",
    "teachers by a column",
)
RESUMED = (
    *("adapter", "an adapter on embeddings", "offloaded", "moving reference", "value model"),
    *("a teacher that is an average", "a teacher of the start", "an adapter's average"),
)
"""Whose checkpoints hold more than a policy and its optimizer."""


def work(folder, cases, runs):
    """What each of the two processes does; it leaves `<rank>.pt` in `folder`."""
    world = World.of(GRPOConfig(output_dir=str(folder / "none"), use_cpu=True, bf16=False, report_to="none"))
    assert world.size == 2
    found = {
        "cases": {name: case_of(name, world) for name in cases},
        "scaled": {name: scaled_of(name, world) for name in SCALED},
        "shares": {share: share_of(share, world) for share in SHARES},
        "tied": tied_of(world),
        "sampled": sampled(world),
        "runs": {name: trained(folder / name, 2, **RUNS[name]) for name in runs},
        "resumed": {name: resumed(name, folder) for name in RESUMED if name in runs},
        "learnt": learnt(folder / "learnt", 2),
        "legs": in_legs(folder) if (folder / "one").is_dir() else None,
    }
    torch.save(found, folder / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import signal

    signal.alarm(580)  # one that hangs ends
    torch.set_num_threads(1)
    is_quick = sys.argv[2] == "quick"
    if sys.argv[2] == "last leg":
        last_leg(Path(sys.argv[1]))
        sys.exit()
    work(Path(sys.argv[1]), QUICK_CASES if is_quick else CASES, QUICK_RUNS if is_quick else RUNS)
