"""Updates of which a part changes, for tests of what is sent."""

import pytest
import torch

from covey.rollout import SamplingParams

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


def update(sampler, model=None, version=0):
    """Send the weights, if a model is passed; megabytes that were sent, None for no update."""
    if model is not None:
        sampler.load(model, version)
    list(sampler.sample(["2 + 2 ="], 2, GREEDY))
    sent = sampler.take_metrics().get("weights/mb")
    return None if sent is None else sent.value


def moved(model, *parts):
    """Move the weights whose names hold one of these."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in parts):
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))


def megabytes(model, *parts):
    held = {id(weight): weight for name, weight in model.named_parameters() if any(part in name for part in parts)}
    return pytest.approx(sum(weight.nbytes for weight in held.values()) / 1e6)


def expect_the_trainers(fake, model):
    theirs = dict(fake.replicas[0].named_parameters())
    assert all(torch.equal(weight, theirs[name]) for name, weight in model.named_parameters())
