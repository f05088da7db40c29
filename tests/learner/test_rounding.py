"""Rounding between sampler and learner costs no completion; another policy's numbers are corrected as TRL does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from covey import algorithms as alg
from covey.learner import Policy
from covey.learner.optimizer import clip
from covey.learner.packing import rows_of
from covey.learner.token_batches import same_weights
from covey.learner.worst_case import groups_of
from covey.training.agents import Agents
from covey.training.build_learner import samples_here
from covey.types import TokenBatch
from kit import learner_of, tiny_model

RATIO = "sampling/importance_sampling_ratio"


def rounded(source="policy"):
    """Two groups whose sampler's log-probabilities are 0.02 a token below the learner's: over 100 tokens a ratio of e^2."""
    groups = groups_of(8, 10, 100, 4, 300)
    policy = Policy(tiny_model(), pad_id=0)
    with torch.no_grad():
        measured = policy.measure(rows_of(groups)).logp.split(4)
    found = []
    for group, logp in zip(groups, measured, strict=True):
        drawn = [replace(c, logprobs=row - 0.02, source=source) for c, row in zip(group.completions, logp, strict=True)]
        found.append(replace(group, completions=tuple(drawn), advantages=torch.tensor([1.0, -1.0, 0.5, -0.5])))
    return found


def step(groups, **more):
    """Metrics of a step and the change of the weights."""
    policy = Policy(tiny_model(), pad_id=0)
    learner = learner_of(policy, torch.optim.SGD(policy.parameters(), lr=1.0), max_completion_length=100, **more)
    before = torch.cat([p.detach().flatten() for p in policy.parameters()])
    report = learner.step(groups, alg.from_options(), 1)
    after = torch.cat([p.detach().flatten() for p in policy.parameters()])
    return {name: metric.value for name, metric in report.metrics.items()}, after - before


def test_rounding_of_a_sampler_in_this_process_leaves_no_completion_out():
    metrics, change = step(rounded(), samples_here=True)
    assert (metrics[f"{RATIO}/min"], metrics[f"{RATIO}/mean"], metrics[f"{RATIO}/max"]) == (1.0, 1.0, 1.0)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.02, rel=1e-3)
    plain = [replace(g, completions=tuple(replace(c, logprobs=None) for c in g.completions)) for g in rounded()]
    assert torch.equal(change, step(plain)[1])


@pytest.mark.parametrize("given", [{"samples_here": False}, {"samples_here": True, "source": "another"}], ids=str)
def test_another_policys_completions_are_corrected_and_masked_as_in_trl(given):
    given = dict(given)
    metrics, change = step(rounded(**({"source": given.pop("source")} if "source" in given else {})), **given)
    assert metrics[f"{RATIO}/max"] == 0.0  # e^2 is above 3
    assert not change.any()


def test_completions_of_several_versions_are_not_of_the_same_weights():
    (group, _) = rounded()
    rows = rows_of(
        [replace(group, completions=(replace(group.completions[0], versions=((3, 2),)), *group.completions[1:]))]
    )
    assert same_weights(rows, torch.device("cpu")).tolist() == [False, True, True, True]


def test_corrections_rejections_and_drift_take_the_learners_number_for_such_rows():
    logp = torch.full((2, 5), -1.0)
    tokens = TokenBatch(
        logp=logp,
        old_logp=logp,
        advantages=-torch.ones(2, 1),
        mask=torch.ones(2, 5, dtype=torch.bool),
        group=torch.zeros(2, dtype=torch.long),
        sampler_logp=logp + 0.7,
        same_weights=torch.tensor([True, False]),
    )
    sequence = alg.Correction(mode="truncate", high=3.0, low=0.1)(tokens)
    assert sequence.squeeze(-1).tolist() == pytest.approx([1.0, 0.1])
    assert alg.Correction(level="token", mode="mask", low=0.9)(tokens)[:, 0].tolist() == [1.0, 0.0]
    assert alg.Rejection()(tokens)[:, 0].tolist() == [1.0, 0.0]
    assert alg.OffPolicyMask()(tokens).squeeze(-1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "args, agents, here",
    [
        ({}, {}, True),
        ({"rollout_backend": "transformers"}, {}, True),
        ({"rollout_backend": "vllm"}, {}, False),
        ({"async_rollouts": True, "max_staleness": 1}, {}, False),
        ({"async_rollouts": True, "max_staleness": 0}, {}, True),
        ({}, {"rollout_func": print}, False),
        ({}, {"agent": print}, False),
    ],
)
def test_only_the_runs_own_sampler_in_this_process_draws_with_the_learners_weights(args, agents, here):
    given = SimpleNamespace(
        args=SimpleNamespace(**{"rollout_backend": "auto", "async_rollouts": False, **args}), agents=Agents(**agents)
    )
    assert samples_here(given) is here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_clipping_rounds_each_gradient_once_and_its_factor_never(dtype):
    gradients = [torch.linspace(0.5, 2.0, 97).to(dtype) for _ in range(2)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in (*gradients, torch.zeros(3))]
    for parameter, gradient in zip(parameters[:2], gradients, strict=True):  # the third has none
        parameter.grad = gradient.clone()
    clip(parameters, norm=3.0, limit=0.71)
    for parameter, gradient in zip(parameters[:2], gradients, strict=True):
        assert torch.equal(parameter.grad, (gradient.float() * (0.71 / 3.000001)).to(dtype))


def test_clipping_without_a_gradient_does_nothing():
    """As on a process that had no completions, while the norm over all processes is above the limit."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    clip([parameter], norm=3.0, limit=0.71)
    assert parameter.grad is None
