"""The longest micro-batch is tried before a run, and what does not fit is known without an update."""

import pytest
import torch

from covey import algorithms as alg
from covey.errors import MemoryLimitError
from covey.learner import FrozenCopy, Policy
from covey.learner.worst_case import try_longest
from kit import learner_of, tiny_model


@pytest.fixture
def learner():
    policy = Policy(tiny_model(), pad_id=0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    return learner_of(policy, optimizer, reference=FrozenCopy.of(policy), max_completion_length=20, max_rows=6)


def measured(learner, monkeypatch, most=None):
    """The sizes of the forward passes with gradient, of which those of more than `most` completions run out of memory."""
    sizes, measure = [], learner.policy.measure

    def watched(rows, **options):
        if torch.is_grad_enabled():
            sizes.append(
                (len(rows), {row.completion.num_tokens for row in rows}, {len(row.prompt.token_ids) for row in rows})
            )
            if most is not None and len(rows) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(rows, **options)

    monkeypatch.setattr(learner.policy, "measure", watched)
    return sizes


def tried(learner):
    return try_longest(learner, alg.grpo(kl=alg.KL(coefficient=0.1)), prompt_tokens=30, group=4, vocabulary=300)


def test_one_micro_batch_of_the_longest_completions_goes_forward_and_backward_and_no_weight_changes(
    learner, monkeypatch
):
    sizes = measured(learner, monkeypatch)
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    found = tried(learner)
    assert sizes == [(6, {20}, {30})]
    assert (found.rows, found.prompt_tokens, found.completion_tokens, found.events) == (6, 30, 20, ())
    assert all(torch.equal(old, new) for old, new in zip(before, learner.policy.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in learner.policy.parameters())


def test_what_the_tokens_of_a_micro_batch_allow_is_what_is_tried(learner, monkeypatch):
    learner.micro_batcher.limits.max_tokens = 30 + 3 * 20
    sizes = measured(learner, monkeypatch)
    assert tried(learner).rows == 3
    assert sizes == [(3, {20}, {30})]


def test_what_does_not_fit_is_halved_and_remembered(learner, monkeypatch):
    sizes = measured(learner, monkeypatch, most=2)
    found = tried(learner)
    assert [rows for rows, *_ in sizes] == [6, 3, 1]
    assert [event.kind for event in found.events] == ["out_of_memory"] * 2
    assert learner.micro_batcher.limits.max_rows == 1


def test_a_single_completion_that_does_not_fit_ends_with_a_sentence(learner, monkeypatch):
    measured(learner, monkeypatch, most=0)
    with pytest.raises(MemoryLimitError, match="does not fit in memory"):
        tried(learner)
    assert all(parameter.grad is None for parameter in learner.policy.parameters())
