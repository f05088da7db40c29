"""The LoRA adapter that the flags of a command ask for."""

import math
import re
from typing import Any

from covey.adapters import SECOND_ADAPTER, adapter_options
from covey.cli.checkpoints import model_folder
from covey.cli.flags import Flag, spelled
from covey.cli.verb import Args
from covey.errors import ConfigError, needed

WEIGHTS = (
    Flag(name="dtype", help="Type that the weights are loaded in: float32, bfloat16, auto, ...", default="float32", group="model"),
    Flag(name="lora_r", help="Train a LoRA adapter of this rank, not all weights.", type=int, group="adapter"),
    Flag(name="lora_alpha", help="Scale of the adapter; unset: twice its rank.", type=float, group="adapter"),
    Flag(name="lora_dropout", help="Dropout of the adapter.", type=float, default=0.0, group="adapter", is_common=False),
    Flag(name="lora_target_modules", help="Layers that get an adapter: ends of their names, or one regular expression of whole names.", type=list[str], default="all-linear", group="adapter", is_common=False),
    Flag(name="lora_target_parameters", help="Parameters that get an adapter, by ends of their names: experts, which are no linear layers.", type=list[str], group="adapter", is_common=False),
)  # fmt: skip
"""Flags of the verbs that train: the type of the weights, and a LoRA adapter."""


def refuse_bad_adapter(args: Args) -> None:
    """Raise ConfigError for options of an adapter without its rank, out of their range, or on a model that is an adapter."""
    if args.get("lora_r") is None:
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"):
            if name in args:
                raise ConfigError(f"{spelled(name)} needs --lora-r, the rank of the adapter.")
        return
    rank, alpha, dropout = args["lora_r"], args.get("lora_alpha", 1.0), args.get("lora_dropout", 0.0)
    if rank < 1:
        raise ConfigError(f"--lora-r {rank} is no rank; give 1 or more, or leave it out to train all weights.")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ConfigError(f"--lora-alpha {alpha} must be a finite number above 0.")
    if not 0 <= dropout < 1:
        raise ConfigError(f"--lora-dropout {dropout} must be at least 0 and below 1.")
    if _saved_adapter(args) is not None:
        raise ConfigError(SECOND_ADAPTER.format(f"{args['model']} holds"))


def adapter(args: Args) -> Any:
    """The PEFT configuration that the flags ask for, or None. Raises ConfigError for flags that make none."""
    refuse_bad_adapter(args)
    if args.get("lora_r") is None:
        return None
    with needed("--lora-r needs the peft package", "peft"):
        from peft import LoraConfig
    return LoraConfig(
        r=args["lora_r"],
        lora_alpha=args.get("lora_alpha", 2 * args["lora_r"]),
        lora_dropout=args.get("lora_dropout", 0.0),
        target_modules=_targets(args.get("lora_target_modules") or ["all-linear"]),
        target_parameters=args.get("lora_target_parameters"),
        task_type="CAUSAL_LM",
    )


def adapter_to_train(args: Args) -> Any:
    """The PEFT configuration of the adapter that a run would train: a new one, or the one that the model's folder holds; or None."""
    folder = _saved_adapter(args)
    if folder is None or args.get("lora_r") is not None:
        return adapter(args)
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = False
    return config


def _saved_adapter(args: Args) -> str | None:
    """The folder of the adapter that `--model` names; None where it names something else."""
    folder = model_folder(args["model"]) if isinstance(args.get("model"), str) else None
    return folder if adapter_options(folder) is not None else None


def _targets(words: list[str]) -> str | list[str]:
    """Ends of layer names as a list; `all-linear`, or a single regular expression, as the string that PEFT reads them from."""
    patterns = [word for word in words if re.fullmatch(r"[\w.]+", word) is None]
    if not patterns:
        return words
    if len(words) > 1:
        raise ConfigError(f"--lora-target-modules {patterns[0]} is an expression of whole names; give it alone.")
    try:
        re.compile(words[0])
    except re.error as error:
        raise ConfigError(f"--lora-target-modules {words[0]} is no regular expression ({error}).") from error
    return words[0]
