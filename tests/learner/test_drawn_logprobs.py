"""Completions without the sampler's log-probabilities beside others that have them: no micro-batch changes their weights."""

from dataclasses import replace

import pytest
import torch
from whole_logits import groups

from covey import algorithms as alg
from covey.learner import Policy
from kit import learner_of, tiny_model


def some(step):
    """Groups in which every second completion comes with log-probabilities."""
    number, out = 0, []
    for group in groups():
        completions = []
        for completion in group.completions:
            logprobs = torch.linspace(-6.0, -4.0, completion.num_tokens)
            completions.append(replace(completion, logprobs=logprobs if number % step == 0 else None))
            number += 1
        out.append(replace(group, completions=tuple(completions)))
    return out


@pytest.mark.parametrize("algorithm", [alg.dapo(), alg.dapo().replace(weights=(alg.TopEntropy(0.5), alg.Correction()))])
def test_the_gradient_is_the_same_for_every_split(algorithm):
    def gradient(max_rows):
        policy = Policy(tiny_model(), pad_id=0)
        seen = []
        one = learner_of(
            policy, torch.optim.SGD(policy.parameters(), lr=0.0), max_completion_length=24, max_rows=max_rows,
            before_update=lambda: seen.append(torch.cat([p.grad.flatten().clone() for p in policy.parameters()])),
        )  # fmt: skip
        report = one.step(some(2), algorithm, 1)
        assert report["sampling/importance_sampling_ratio/mean"] < 1.0
        return seen[0]

    whole, single = gradient(64), gradient(1)
    torch.testing.assert_close(single, whole, rtol=1e-4, atol=1e-7)
