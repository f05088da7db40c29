"""accelerate's view of this process, for scripts and callbacks that ask a trainer for it."""

from __future__ import annotations

from typing import Any

from covey.process.lean import imported


def accelerator_of(args: Any) -> Any:
    """An `accelerate.Accelerator` of the process group that runs: its device, processes, `print`, `unwrap_model`, `gather`.

    Training does not go through it: what it is told to prepare is not what is trained.
    """
    imported("accelerate.accelerator")
    from accelerate import Accelerator

    device = args.device  # makes the process group first, on the device that the options choose
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    return Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
