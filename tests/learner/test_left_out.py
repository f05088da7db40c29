"""A completion that does not fit in memory even alone is left out of its step: the others learn what they would have."""

from dataclasses import replace

import pytest
import torch
from distilled import trainer_of

from covey import algorithms as alg
from covey.errors import MemoryLimitError
from covey.learner import Policy, Supervised
from covey.learner.supervised import supervised_policy
from covey.types import Prompt
from kit import completion, group, learner_of, tiny_model

TOO_LONG = 30


def small_learner(rows=4):
    policy = Policy(tiny_model(), pad_id=0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    return learner_of(policy, optimizer, max_completion_length=40, max_rows=rows, max_grad_norm=0.0)


def groups_of(lengths, taught):
    """One group; the completions of which `taught` is False have no advantage."""
    draw = torch.Generator().manual_seed(0)
    answers = tuple(completion(ids=torch.randint(3, 250, (n,), generator=draw).tolist()) for n in lengths)
    advantages = torch.linspace(-1, 1, len(lengths)) * torch.tensor(taught)
    return [replace(group(["?"] * len(lengths)), completions=answers, advantages=advantages)]


def short_of_memory(learner, monkeypatch):
    """Micro-batches with a completion of `TOO_LONG` tokens run out. Returns the sizes that were tried."""
    return short_of(learner.policy, monkeypatch)


def short_of(policy, monkeypatch):
    measure, tried = policy.measure, []

    def measured(rows, **options):
        tried.append([row.completion.num_tokens for row in rows])
        if any(row.completion.num_tokens >= TOO_LONG for row in rows):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(rows, **options)

    monkeypatch.setattr(policy, "measure", measured)
    return tried


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "bnpo"])
def test_the_others_learn_as_if_it_had_no_advantage_and_the_denominators_stay(name, monkeypatch):
    lengths, algorithm = [5, 35, 9, 7, 6, 8, 5, 9], getattr(alg, name)()
    free = small_learner().step(groups_of(lengths, [length < TOO_LONG for length in lengths]), algorithm, 1)
    learner = small_learner()
    short_of_memory(learner, monkeypatch)
    short = learner.step(groups_of(lengths, [True] * 8), algorithm, 1)
    assert short["grad_norm"] == pytest.approx(free["grad_norm"], rel=1e-5)
    assert short["completions/left_out"] == 1
    assert [event.kind for event in short.events] == ["out_of_memory", "completion_left_out"]
    assert "A completion of 35 tokens to prompt" in short.events[-1].said
    assert "completions/left_out" not in free.metrics


def test_it_is_tried_again_in_the_next_step_and_the_others_keep_their_micro_batches(monkeypatch):
    learner = small_learner(rows=8)
    tried = short_of_memory(learner, monkeypatch)
    learner.step(groups_of([35, 5, 5, 5, 5, 5, 5, 5], [True] * 8), alg.dapo(), 1)
    assert learner.micro_batcher.limits.max_rows == 4
    tried.clear()
    again = learner.step(groups_of([35, 5, 5, 5, 5, 5, 5, 5], [True] * 8), alg.dapo(), 2)
    assert tried[0] == [35]
    assert [len(sizes) for sizes in tried[1:]] == [4, 3]
    assert again["completions/left_out"] == 1


def test_more_than_one_in_eight_ends_with_the_sentence(monkeypatch):
    learner = small_learner()
    short_of_memory(learner, monkeypatch)
    with pytest.raises(MemoryLimitError, match=r"One completion of \d+ tokens with its prompt does not fit in memory"):
        learner.step(groups_of([35, 34, 5, 5, 5, 5, 5, 5], [True] * 8), alg.dapo(), 1)


def test_activations_are_computed_again_once_a_single_completion_does_not_fit(tmp_path, monkeypatch):
    def norms(folder, **options):
        run = trainer_of(tmp_path / folder, "dapo", max_steps=2, **options)
        run.train()
        return run, [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]

    _, expected = norms("free", gradient_checkpointing=False)
    measure, ways = Policy.measure, []

    def measured(policy, rows, **options):
        ways.append((len(rows), policy.is_checkpointing))
        if torch.is_grad_enabled() and not policy.is_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(policy, rows, **options)

    monkeypatch.setattr(Policy, "measure", measured)
    run, found = norms("short", checkpoint_when_needed=True)
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 2
    assert run._running.learner.policy.is_checkpointing
    assert (1, False) in ways


def test_what_is_measured_before_the_advantages_is_needed_of_all(monkeypatch):
    learner = small_learner()
    learner.is_off_policy = True
    short_of_memory(learner, monkeypatch)
    with pytest.raises(MemoryLimitError):
        learner.annotate(groups_of([35, 5, 5, 5, 5, 5, 5, 5], [True] * 8), alg.dapo())


def test_a_supervised_example_that_does_not_fit_is_left_out_and_counted_apart(monkeypatch):
    def examples_of(longest):
        policy = Policy(tiny_model(), pad_id=0)
        lengths = [longest, 5, 6, 7, 5, 6, 7, 8]
        example = lambda i: (Prompt(uid=f"sft:{i}", token_ids=(1, 2, 3)), completion(ids=range(5, 5 + lengths[i])))
        term = Supervised(supervised_policy(policy), example, count=8, weight=1.0, batch_size=8)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        options = {"max_completion_length": 40, "max_rows": 4, "max_grad_norm": 0.0, "supervised": term}
        return learner_of(policy, optimizer, **options)

    learner, algorithm = examples_of(35), alg.dapo().replace(objective=alg.zero)
    tried = short_of(learner.supervised.policy, monkeypatch)
    short = learner.step(groups_of([5] * 8, [True] * 8), algorithm, 1)
    assert short["sft/left_out"] == 1
    assert "completions/left_out" not in short.metrics
    assert tried.count([35]) == 1, "it is left out at its first failure alone"
    free = examples_of(35)
    loss = free.supervised.loss
    free.supervised.loss = lambda batch, count: loss([row for row in batch if row.completion.num_tokens < 30], count)
    assert free.step(groups_of([5] * 8, [True] * 8), algorithm, 1)["grad_norm"] == pytest.approx(
        short["grad_norm"], rel=1e-5
    )
    both = examples_of(35)
    short_of(both.supervised.policy, monkeypatch)
    short_of(both.policy, monkeypatch)
    report = both.step(groups_of([35, 5, 5, 5, 5, 5, 5, 5], [True] * 8), alg.dapo(), 1)
    assert (report["sft/left_out"], report["completions/left_out"]) == (1, 1)
