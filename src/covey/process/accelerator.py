"""The `accelerate.Accelerator` of a trainer, for scripts and callbacks that use `trainer.accelerator`."""

from typing import Any

from covey.process.lean import imported


def accelerator_of(args: Any) -> Any:
    """An `accelerate.Accelerator` of the running process group: its device, processes, `print`, `unwrap_model`, `gather`.

    Training does not use it: objects passed to its `prepare` are not trained.
    """
    imported("accelerate.accelerator")
    from accelerate import Accelerator

    device = args.device  # first creates the process group on the configured device
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    return Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
