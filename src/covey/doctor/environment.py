"""Checks of the machine: supported versions, threads, the accelerator, and its precision."""

import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

import torch
from packaging.requirements import Requirement

from covey.doctor.finding import Finding, failed, passed, warned
from covey.process.cores import usable_cores
from covey.runs.provenance import version_of

AREA = "environment"


def environment(args: Any) -> Iterator[Finding]:
    """Findings on everything that does not depend on model or data."""
    yield from versions(metadata.requires("covey") or ())
    yield threads(torch.get_num_threads(), usable_cores(), on_cpu=args.device.type == "cpu")
    yield from device(args, has_card=shutil.which("nvidia-smi") is not None)
    yield precision(args)


def versions(requirements: Iterable[str]) -> Iterator[Finding]:
    """FAIL for each required package that is missing or out of its tested range; else one PASS that names the main ones."""
    is_clean = True
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = version_of(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            is_clean = False
            have = "is not installed" if installed is None else f"is {installed}"
            yield failed(
                AREA,
                f"{requirement.name} {have}, and {requirement.specifier} is tested.",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
    if is_clean:
        shown = {name: version_of(name) for name in ("torch", "transformers", "datasets", "accelerate")}
        yield passed(AREA, "versions are supported: " + ", ".join(f"{n} {v}" for n, v in shown.items()), **shown)


def threads(used: int, cores: int, *, on_cpu: bool) -> Finding:
    """WARN for more threads than cores (they wait for each other), or for one of many cores where a CPU does the work."""
    facts = {"threads": used, "cores": cores}
    if used > cores:
        fix = f"set OMP_NUM_THREADS={cores}"
        return warned(
            AREA, f"torch uses {used} threads on {cores} usable cores, so that they wait for each other.", fix, **facts
        )
    if on_cpu and cores > 1 and used == 1:
        return warned(AREA, f"torch uses 1 thread of {cores} usable cores.", f"set OMP_NUM_THREADS={cores}", **facts)
    return passed(AREA, f"{used} threads on {cores} usable cores", **facts)


def device(args: Any, *, has_card: bool) -> Iterator[Finding]:
    """Device of the run, and a warning where a faster device is idle."""
    name = args.device.type
    if name == "cpu" and args.use_cpu and torch.cuda.is_available():
        yield warned(AREA, "the run computes on the processor while a GPU is there.", "leave --use-cpu out")
    elif name == "cpu" and has_card and not torch.cuda.is_available():
        yield warned(
            AREA,
            "a GPU is there, but this torch cannot use it.",
            "install the torch build for your CUDA driver (see pytorch.org), then check torch.cuda.is_available()",
        )
    elif name == "cuda":
        card = torch.cuda.get_device_properties(args.device)
        yield passed(AREA, f"computes on {card.name}, {card.total_memory / 2**30:.0f} GiB", device=card.name)
    else:
        yield passed(AREA, f"computes on the {'processor' if name == 'cpu' else name}", device=name)


def precision(args: Any) -> Finding:
    """Precision of matrix products. Precisions that the machine lacks are refused when the options are read."""
    if args.fp16:
        sentence = "computes in float16, whose range is small: gradients need scaling, and sampled and learnt log-probabilities part."
        return warned(
            AREA, sentence, "use --bf16 where the accelerator has bfloat16 (Ampere or newer)", compute="float16"
        )
    if args.bf16:
        return passed(AREA, "computes in bfloat16", compute="bfloat16")
    if args.device.type == "cuda":
        sentence = (
            "computes in float32 on a GPU, which takes about twice the memory and several times the time of bfloat16."
        )
        return warned(AREA, sentence, "use --bf16", compute="float32")
    return passed(AREA, "computes in float32", compute="float32")
