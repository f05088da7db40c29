"""A case that is in order, to be broken in one place at a time."""

import pytest

from covey import GRPOConfig
from covey.data import load
from covey.demo import DEMO_SETTINGS
from covey.doctor import Case, examine

SETTINGS = {
    **DEMO_SETTINGS,
    "per_device_train_batch_size": 32,
    "num_generations": 4,
    "use_cpu": True,
    "report_to": "none",
}


@pytest.fixture
def case(tmp_path):
    """A function that makes the demo's case: `options` of GRPOConfig, anything else a field of `Case`."""

    def make(options=None, **fields):
        wanted = {**SETTINGS, "output_dir": str(tmp_path / "run"), **(options or {})}
        healthy = {
            "model": "demo",
            "rewards": ["demo"],
            "configure": lambda: GRPOConfig(**wanted),
            "load_dataset": lambda: load("demo", limit=60),
            "load_held_out": lambda: load("demo:test", limit=20),
            "prompts": 0,
        }
        return Case(**{**healthy, **fields})

    return make


@pytest.fixture
def found():
    """A function: what the examination finds in an area with a status, as one text."""

    def look(case, status, area):
        return "\n".join(f"{one.said} {one.fix}" for one in examine(case) if (one.status, one.area) == (status, area))

    return look
