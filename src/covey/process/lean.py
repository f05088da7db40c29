"""transformers' options and callbacks, imported without PEFT, which would bring in bitsandbytes and half of torch's compiler."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

_CLASSES = ("PeftModel", "PeftMixedModel")


class _OfPeft(type):
    """Metaclass of a placeholder for a class of PEFT: `isinstance` is False until PEFT has been imported elsewhere."""

    def __instancecheck__(cls, instance: object) -> bool:
        kind: Any = getattr(sys.modules.get("peft"), cls.__name__, None)
        return kind is not None and isinstance(instance, kind)


def imported(module: str) -> Any:
    """Import a module of transformers that uses PEFT only for `isinstance`, without importing PEFT.

    If PEFT is imported already, it is used as usual.
    """
    if "peft" in sys.modules or module in sys.modules:
        return importlib.import_module(module)
    spec = importlib.util.find_spec("peft")
    if spec is None:
        return importlib.import_module(module)
    from transformers.utils import is_peft_available

    is_peft_available()  # looks for the module and caches the result
    stand_in = ModuleType("peft")
    stand_in.__spec__ = spec
    for name in _CLASSES:
        setattr(stand_in, name, _OfPeft(name, (), {}))
    sys.modules["peft"] = stand_in
    try:
        return importlib.import_module(module)
    finally:
        if sys.modules.get("peft") is stand_in:
            del sys.modules["peft"]


imported("transformers.trainer_utils")
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments, set_seed  # noqa: E402
from transformers.trainer_callback import (  # noqa: E402
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import PredictionOutput, SchedulerType, TrainOutput, enable_full_determinism  # noqa: E402
from transformers.training_args import OptimizerNames  # noqa: E402

__all__ = [
    "CallbackHandler", "DefaultFlowCallback", "EarlyStoppingCallback", "ExportableState", "OptimizerNames",
    "PredictionOutput", "SchedulerType", "TrainOutput", "TrainerCallback", "TrainerControl", "TrainerState",
    "TrainingArguments", "accelerator_of", "enable_full_determinism", "imported", "set_seed",
]  # fmt: skip


def accelerator_of(args: Any) -> Any:
    """An `accelerate.Accelerator` of the running process group: its device, processes, `print`, `unwrap_model`, `gather`.

    Training does not use it: objects passed to its `prepare` are not trained.
    """
    imported("accelerate.accelerator")
    from accelerate import Accelerator

    device = args.device  # first creates the process group on the configured device
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    return Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
