"""Teachers of a planned run: forward passes of models in the learners' processes. Those behind an endpoint have GPUs of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from covey.algorithms.teachers import POLICY, is_address
from covey.config import GRPOConfig
from covey.doctor.roofline.estimate import Teaching
from covey.training.build_algorithm import build_algorithm


def teachers_of(config: GRPOConfig, policy: Any, config_of: Callable[[str, bool], Any]) -> tuple[Teaching, ...]:
    """The teachers of the run's algorithm. `policy`: transformers' configuration of the model, its own teacher without more weights."""
    role = build_algorithm(config).role
    named = () if role is None else role.teacher
    names = list(named) if isinstance(named, Mapping | list | tuple) else [named]
    made = []
    for name in names:
        if isinstance(name, str) and is_address(name):
            continue  # its server's seconds overlap with those of other processes
        if name == POLICY or not isinstance(name, str):
            made.append(Teaching(parameters=_parameters(policy), weights=0))
            continue
        size = _parameters(config_of(name, config.trust_remote_code))
        made.append(Teaching(parameters=size, weights=2 * size))
    return tuple(made)


def _parameters(model_config: Any) -> int:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return sum(p.numel() for p in auto.from_config(model_config).parameters())
