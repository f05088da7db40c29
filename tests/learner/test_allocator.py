"""Segments of CUDA's allocator: expandable for a run on a GPU, unless the user configures the allocator."""

import pytest
import torch

from covey.process.memory import expand_segments


@pytest.fixture
def settings(monkeypatch):
    """What the allocator was set to."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", calls.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_a_gpus_segments_expand(settings):
    expand_segments(torch.device("cpu"))
    assert settings == []
    expand_segments(torch.device("cuda"))
    assert settings == ["expandable_segments:True"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_the_user_configures_is_left_alone(settings, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:256")
    expand_segments(torch.device("cuda"))
    assert settings == []
