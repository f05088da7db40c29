"""Post-train language models with GRPO and its family: `from covey import GRPOConfig, GRPOTrainer`.

Public names are imported when they are first used, so that `import covey` and the command line start at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey import algorithms, data, errors, rewards, rollout, runs, testing, types
    from covey.algorithms import Algorithm
    from covey.config import GRPOConfig
    from covey.config.grpo_config import batch_arithmetic
    from covey.ensembles import Ensemble, Member
    from covey.errors import CoveyError
    from covey.figures import Run, plot
    from covey.rollout import NativeSampler, SamplingParams
    from covey.training.together import train_together
    from covey.training.trainer import GRPOTrainer
    from covey.training.warm_up import SFTTrainer, sft_config

__version__ = "0.1.0"

_WHERE = {
    "Algorithm": "covey.algorithms",
    "CoveyError": "covey.errors",
    "Ensemble": "covey.ensembles",
    "GRPOConfig": "covey.config.grpo_config",
    "GRPOTrainer": "covey.training.trainer",
    "Member": "covey.ensembles",
    "NativeSampler": "covey.rollout",
    "Run": "covey.figures",
    "SFTTrainer": "covey.training.warm_up",
    "SamplingParams": "covey.rollout",
    "batch_arithmetic": "covey.config.grpo_config",
    "plot": "covey.figures",
    "sft_config": "covey.training.warm_up",
    "train_together": "covey.training.together",
}
_MODULES = ("algorithms", "data", "errors", "rewards", "rollout", "runs", "testing", "types")

__all__ = [
    "Algorithm",
    "CoveyError",
    "Ensemble",
    "GRPOConfig",
    "GRPOTrainer",
    "Member",
    "NativeSampler",
    "Run",
    "SFTTrainer",
    "SamplingParams",
    "algorithms",
    "batch_arithmetic",
    "data",
    "errors",
    "plot",
    "rewards",
    "rollout",
    "runs",
    "sft_config",
    "testing",
    "train_together",
    "types",
]


def _set_threads() -> None:
    """Spin time of OpenMP's threads before they sleep, unless the user has set it. It is read when torch is imported.

    Always (the default) is up to 60 times slower as soon as another process wants a core, never is 2.1 times slower on a
    quiet one, where a step is thousands of small products; some microseconds cost neither.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "torch" not in sys.modules:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


_set_threads()


def expect_docstrings() -> None:
    """Raise ConfigError under `python -OO`, which strips the docstrings that transformers reads when it is imported."""
    if sys.flags.optimize >= 2:
        from covey.errors import ConfigError

        raise ConfigError("python -OO strips docstrings, which transformers needs; use python -O, or neither.")


def __getattr__(name: str) -> Any:
    if name in (*_MODULES, *_WHERE):
        expect_docstrings()
    if name in _MODULES:
        return importlib.import_module(f"covey.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
