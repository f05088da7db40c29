"""One model, one rollout and one update, with and without `reuse_rollout`, in turns: seconds, and the gap of the gradients.

    python benchmarks/reuse.py --size 10m --beta 0.04

4 prompts x 8 completions of up to 200 tokens, every completion with an advantage, in the faster precision of this processor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace

import torch

import rollout
from covey import algorithms as alg
from covey.learner import FrozenCopy, NoReference, Policy
from covey.learner.memory import bytes_for_outputs
from covey.outputs import Outputs
from covey.rollout import NativeSampler, SamplingParams
from covey.types import Group
from learner import as_in_runs, learner_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=rollout.SHAPES, default="10m")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    dtype = torch.bfloat16 if rollout.processor_has_bfloat16() else torch.float32
    model, tokenizer = rollout.trained(given.size, 120 if given.size == "10m" else 60)
    policy = Policy(model, pad_id=0, compute_dtype=dtype if dtype != torch.float32 else None)
    reference = FrozenCopy.of(policy) if given.beta else NoReference()
    algorithm = alg.grpo(kl=given.beta or None)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    learner = learner_of(policy, optimizer, max_completion_length=200, max_rows=32, **as_in_runs())
    learner.reference = reference
    sampler = NativeSampler(model, tokenizer, dtype=str(dtype).removeprefix("torch."))
    prompts = rollout.questions(4, 0)
    outputs = Outputs(bytes_for_outputs(True, model.config.hidden_size, is_checkpointed=False))
    sampler.keep(outputs)
    seconds: dict[tuple[str, bool], list[float]] = {}
    gradients: dict[bool, list[torch.Tensor]] = {}
    for turn in range(given.repeats + 1):
        for keeps in (False, True):
            sampler.load(model, version=turn)
            policy.outputs = outputs if keeps else None
            started = time.perf_counter()
            with outputs.filling() if keeps else nullcontext():
                groups = list(sampler.sample(prompts, 8, SamplingParams(max_tokens=200, seed=turn)))
            drawn = time.perf_counter()
            judged = [replace(group, advantages=torch.linspace(-1, 1, 8)) for group in by_prompt(groups)]
            learner.before_update = lambda keeps=keeps: gradients.__setitem__(
                keeps, [parameter.grad.clone() for parameter in policy.parameters()]
            )
            begun = time.perf_counter()
            learner.step(learner.annotate(judged, algorithm), algorithm, turn + 1)
            seconds.setdefault(("rollout", keeps), []).append(drawn - started)
            seconds.setdefault(("learn", keeps), []).append(time.perf_counter() - begun)
    middle = {key: statistics.median(found[1:]) for key, found in seconds.items()}
    print(f"{given.size}, {dtype}, beta {given.beta}, {torch.get_num_threads()} thread(s)")
    for phase in ("rollout", "learn"):
        plain, kept = middle[phase, False], middle[phase, True]
        print(f"{phase:<8} {plain:.3f} s without, {kept:.3f} s with ({kept / plain:.2f})")
    both = [middle["rollout", keeps] + middle["learn", keeps] for keeps in (False, True)]
    print(f"both     {both[0]:.3f} s without, {both[1]:.3f} s with ({both[1] / both[0]:.2f})")
    one, two = (torch.cat([gradient.flatten() for gradient in gradients[keeps]]) for keeps in (False, True))
    print(f"gradients differ by {float((one - two).norm() / one.norm()):.2g} of their norm")
    held = sum(slab.numel() * slab.element_size() for slab in outputs.slabs) / outputs._capacity * outputs._used
    print(f"outputs of {outputs._used} tokens: {held / 2**20:.0f} MiB")


def by_prompt(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.prompt.uid)


if __name__ == "__main__":
    main()
