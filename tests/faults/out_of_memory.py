"""Run apart, under a limit of its address space: a learner's step and a sampler that do not fit at once.

`python out_of_memory.py WHAT SPARE_MIB` prints one JSON object; a limit of 0 is none.
"""

import json
import logging
import os
import resource
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from covey import algorithms as alg
from covey.errors import MemoryLimitError
from covey.learner import Policy
from covey.rollout import NativeSampler, SamplingParams
from covey.training.build_learner import checkpoint_once
from kit import completion, group, learner_of, tiny_model, tiny_tokenizer

torch.set_num_threads(1)


def limit(spare_mib):
    """No more than `spare_mib` beyond what the process has now."""
    if spare_mib:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + spare_mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def small_learner(rows, checkpoints):
    policy = Policy(tiny_model(layers=6, hidden=128, max_position_embeddings=1024), pad_id=0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    return learner_of(
        policy,
        optimizer,
        max_completion_length=900,
        max_rows=rows,
        max_grad_norm=0.0,
        enable_recomputation=partial(checkpoint_once, policy) if checkpoints else lambda: False,
    )


def learn(spare_mib, is_warm=True, checkpoints=False, size=300, giant=None, is_giant_taught=True):
    """The norm of the gradient of one step over 16 completions of `size` tokens, and what was said on the way.

    `giant`: the tokens of the first completion of the second prompt, and whether it has an advantage.
    """
    groups = []
    for uid in ("a", "b"):
        drawn = group(["?"] * 8, uid=uid)
        draw = torch.Generator().manual_seed(ord(uid))
        answers = tuple(
            completion(ids=torch.randint(3, 250, (size,), generator=draw).tolist()) for _ in drawn.completions
        )
        advantages = torch.linspace(-1, 1, 8)
        if giant and uid == "b":
            answers = (completion(ids=torch.randint(3, 250, (giant,), generator=draw).tolist()), *answers[1:])
            advantages[0] *= is_giant_taught
        groups.append(replace(drawn, completions=answers, advantages=advantages))
    learner = small_learner(16, checkpoints)
    if is_warm:
        first = [replace(one, completions=one.completions[-1:], advantages=torch.ones(1)) for one in groups]
        learner.step(first, alg.dapo(), 1)
    limit(spare_mib)
    report = learner.step(groups, alg.dapo(), 2)
    again = learner.step(groups, alg.dapo(), 3)
    return {
        "norms": [report["grad_norm"], again["grad_norm"]],
        "events": [event.kind for event in report.events],
        "said": [event.said for event in report.events],
        "left_out": [
            one.metrics["completions/left_out"].value
            for one in (report, again)
            if "completions/left_out" in one.metrics
        ],
        "later_events": [event.kind for event in again.events],
        "rows": learner.micro_batcher.limits.max_rows,
        "checkpoints": learner.policy.is_checkpointing,
    }


def sample(spare_mib):
    """The tokens of 8 groups of 8, and how many completions were in flight in the end."""
    model = tiny_model(layers=4, hidden=256, max_position_embeddings=2048)
    sampler = NativeSampler(model, tiny_tokenizer(), eos_ids=[2], max_rows=64, cache_bytes=2**31)
    params = SamplingParams(max_tokens=150, seed=3)
    list(sampler.sample(["warm"], 8, replace(params, max_tokens=4)))
    limit(spare_mib)
    groups = sampler.sample([f"question {i}" for i in range(8)], 8, params)
    answers = {one.prompt.text: [c.token_ids.tolist() for c in one.completions] for one in groups}
    return {"answers": dict(sorted(answers.items())), "rows": sampler.max_rows}


def update(spare_mib):
    """A step with AdamW: what was raised, and whether any weight had changed by then."""
    learner = small_learner(4, checkpoints=False)
    learner.optimizer = torch.optim.AdamW(learner.policy.parameters(), lr=0.1)
    learner.scheduler = torch.optim.lr_scheduler.ConstantLR(learner.optimizer, factor=1.0)
    for parameter in learner.policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    limit(spare_mib)
    said = ""
    try:
        learner._update({}, 1)
    except MemoryLimitError as error:
        said = str(error)
    pairs = zip(before, learner.policy.parameters(), strict=True)
    changed = [not torch.equal(old, new) for old, new in pairs]
    return {"said": said, "changed": sum(changed), "of": len(changed)}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    if (
        sys.argv[1] != "learn-as-is"
    ):  # code that is made while it runs takes a share of a narrow limit that differs by machine
        os.environ["COVEY_CPU_KERNELS"] = "0"
    work = {
        "learn": learn,
        "learn-as-is": learn,
        "learn-cold": lambda spare: learn(spare, is_warm=False, size=800),
        "learn-giant": lambda spare: learn(spare, size=40, giant=900),
        "learn-silent-giant": lambda spare: learn(spare, size=40, giant=900, is_giant_taught=False),
        "sample": sample,
        "update": update,
    }
    work["learn-cold-checkpointing"] = lambda spare: learn(spare, is_warm=False, checkpoints=True, size=800)
    try:
        sys.stdout.write(json.dumps(work[sys.argv[1]](int(sys.argv[2]))))
    except MemoryLimitError as error:
        sys.stdout.write(json.dumps({"raised": type(error).__name__, "said": str(error)}))
