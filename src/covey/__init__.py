"""Post-train language models with GRPO and its family: `from covey import GRPOConfig, GRPOTrainer`.

Public names are imported when they are first used, so that `import covey` and the command line start at once.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey import algorithms, data, errors, rewards, rollout, runs, testing, types
    from covey.algorithms import Algorithm
    from covey.config import GRPOConfig
    from covey.config.batches import batch_arithmetic
    from covey.config.scripts import (
        DatasetMixtureConfig,
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_dataset,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from covey.ensembles import Ensemble, Member
    from covey.errors import CoveyError
    from covey.evaluation.figures import Run, plot
    from covey.experiments.together import train_together
    from covey.rollout import NativeSampler, SamplingParams
    from covey.training.trainer import GRPOTrainer
    from covey.training.warm_up import SFTTrainer, sft_config

__version__ = "0.1.0"

_NAMES = {
    "algorithms": "Algorithm",
    "config.batches": "batch_arithmetic",
    "config.grpo_config": "GRPOConfig",
    "config.scripts": "DatasetMixtureConfig ModelConfig ScriptArguments TrlParser get_dataset get_kbit_device_map get_peft_config get_quantization_config",
    "ensembles": "Ensemble Member",
    "errors": "CoveyError",
    "evaluation.figures": "Run plot",
    "experiments.together": "train_together",
    "rollout": "NativeSampler SamplingParams",
    "training.trainer": "GRPOTrainer",
    "training.warm_up": "SFTTrainer sft_config",
}
_WHERE = {name: f"covey.{module}" for module, names in _NAMES.items() for name in names.split()}
_TRLS = {
    **dict.fromkeys(
        ("BEMACallback", "LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback", "WeaveCallback"),
        "it is a callback of TRL, which works here too: from trl import {name}",
    ),
    **dict.fromkeys(
        ("DPOConfig", "DPOTrainer", "KTOConfig", "KTOTrainer", "DistillationConfig", "DistillationTrainer"),
        "Covey trains with GRPO and its family only: from trl import {name}",
    ),
    **dict.fromkeys(
        ("RewardConfig", "RewardTrainer"), "train a reward model with `covey reward train`, or: from trl import {name}"
    ),
    "RLOOConfig": "use GRPOConfig, with `algorithm=alg.rloo()` in GRPOTrainer",
    "RLOOTrainer": "use GRPOTrainer with `algorithm=alg.rloo()`",
    "SFTConfig": "use `sft_config(...)`, which SFTTrainer takes",
    "create_reference_model": "leave it out: GRPOTrainer makes its reference when beta is above 0",
    "clone_chat_template": "from trl import clone_chat_template",
    "init_zero_verbose": "leave it out",
    "apply_chat_template": "leave it out: GRPOTrainer applies the chat template to messages",
    "maybe_apply_chat_template": "leave it out: GRPOTrainer applies the chat template to messages",
}
"""Names of TRL that Covey does not have, with what to do instead."""
_TRAINING = ("GRPOTrainer", "SFTTrainer", "train_together")
"""Names that a script imports when it is about to train, which takes seconds of loading."""
_MODULES = ("algorithms", "data", "errors", "rewards", "rollout", "runs", "testing", "types")

__all__ = [
    "Algorithm", "CoveyError", "DatasetMixtureConfig", "Ensemble", "GRPOConfig", "GRPOTrainer", "Member",
    "ModelConfig", "NativeSampler", "Run", "SFTTrainer", "SamplingParams", "ScriptArguments", "TrlParser",
    "algorithms", "batch_arithmetic", "data", "errors", "get_dataset", "get_kbit_device_map", "get_peft_config",
    "get_quantization_config", "plot", "rewards", "rollout", "runs", "sft_config", "testing", "train_together",
    "types",
]  # fmt: skip


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
    if name in _TRLS:
        raise ImportError(f"covey has no {name}: {_TRLS[name].format(name=name)}.", name="covey")
    if name not in _WHERE:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    if name in _TRAINING:
        from covey.process.importing import HEAVY, show_imports

        show_imports(roots=(_WHERE[name], *HEAVY), header=f"covey {__version__}: loading PyTorch and transformers")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
