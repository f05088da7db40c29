"""`covey doctor` tries the longest micro-batch of the run."""

import pytest
import torch

from covey.doctor import examine
from covey.learner import Policy


def of_memory(case):
    return [one for one in examine(case) if one.area == "memory"]


def test_the_longest_micro_batch_is_tried_with_the_longest_prompt(case):
    small = {"per_device_train_batch_size": 8, "max_completion_length": 16}
    findings = list(examine(case(small, prompts=1)))
    longest = next(one.facts["longest"] for one in findings if "longest" in one.facts)
    [found] = [one for one in findings if one.area == "memory"]
    assert found.status == "PASS"
    assert f"the longest micro-batch, 8 completions of 16 tokens behind prompts of {longest}, fits" in found.said


@pytest.mark.slow
def test_one_that_has_to_be_made_smaller_is_warned_of(case, monkeypatch):
    measure = Policy.measure

    def short(self, rows, **options):
        if torch.is_grad_enabled() and len(rows) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(self, rows, **options)

    monkeypatch.setattr(Policy, "measure", short)
    [found] = of_memory(case({"per_device_train_batch_size": 8, "max_completion_length": 16}, prompts=1))
    assert found.status == "WARN"
    assert "does not fit: Memory ran out on a micro-batch of 8 completions" in found.said
    assert "from now on at most 4" in found.said
