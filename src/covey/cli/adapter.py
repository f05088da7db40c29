"""The adapter that the flags of a command ask for."""

from __future__ import annotations

from typing import Any

from covey.cli.verb import Given
from covey.errors import ConfigError


def adapter(given: Given) -> Any:
    """The PEFT configuration that the flags ask for, or None."""
    if not given.get("lora_r"):
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            if name in given:
                raise ConfigError(f"--{name.replace('_', '-')} needs --lora-r, the rank of the adapter.")
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError("--lora-r needs the peft package: pip install 'covey[peft]'.") from error
    return LoraConfig(
        r=given["lora_r"],
        lora_alpha=given.get("lora_alpha", 2 * given["lora_r"]),
        lora_dropout=given.get("lora_dropout", 0.0),
        target_modules=given.get("lora_target_modules", "all-linear"),
        task_type="CAUSAL_LM",
    )
