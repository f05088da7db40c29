"""Packed rows in float64: where float32 differs from single rows by more than 1e-5, rounding is all of it."""

import pytest
import torch
from shared_rows import ROWS, gradients

from covey.learner.policy import Policy
from kit import Doubled, rest_nightly
from rollout.causal_classes import build

KINDS = ("qwen3_5_text", "gemma4_text", "gemma3n_text", "gemma2", "lfm2", "mamba2", "recurrent_gemma")
"""None has experts, whose grouped products PyTorch does not have in float64."""


@pytest.mark.parametrize("kind", rest_nightly(KINDS, ("gemma4_text",)))
def test_gradients_of_packed_rows_are_those_of_single_rows(kind):
    with Doubled():
        policy = Policy(build(kind).double().train(), pad_id=0)
        assert policy.shares_prompts()
        together = gradients(policy, [ROWS])
        policy.release()
        apart = gradients(policy, [[row] for row in ROWS])
        policy.release()
    for mine, plain in zip(together[0], apart[0], strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, plain, atol=1e-9, rtol=0)
    assert together[1].keys() == apart[1].keys()
    whole = torch.stack([gradient.norm() for gradient in apart[1].values()]).norm()
    for name, gradient in apart[1].items():
        assert (together[1][name] - gradient).norm() <= 1e-9 * gradient.norm() + 1e-12 * whole, name
