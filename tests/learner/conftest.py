"""FlexAttention where there is no GPU."""

import warnings

import pytest
from torch.nn.attention import flex_attention

from covey.kernels import flex_attention as shared_flex


@pytest.fixture
def flex_on_a_cpu(monkeypatch):
    """FlexAttention is tried on a CPU too, uncompiled. torch refuses its backward there, which that form computes all the same."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *given: None)
    monkeypatch.setattr(shared_flex, "reason_against", shared_flex.tried)
    shared_flex.tried.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled, and what tracing it says of torch itself
        yield
    shared_flex.tried.cache_clear()
