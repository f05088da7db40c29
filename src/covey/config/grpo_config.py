"""Every option of a run: TRL's names and defaults, and a few of Covey's own. Each has one sentence, and acts or is refused."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from covey.config import alerts, checks, options
from covey.config.combinations import features_of, name_idle
from covey.config.fields import Options
from covey.config.parallelism import expect_processes, settle_parallelism
from covey.config.sharding import settle_sharding, split_by_covey
from covey.errors import ArgumentTypeError, ConfigError, did_you_mean
from covey.names import refuse_other_types
from covey.process.lean import TrainingArguments
from covey.process.world import is_on_cpu_with_others, join, starting_on_a_free_port

_NOT_FOR_TRANSFORMERS: dict[str, Any] = {
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode")),  # it would switch TF32 on
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), False),  # it would want a GPU
}
"""Options without effect here on which transformers acts at construction, with what it is shown."""


@dataclass(repr=False)
class GRPOConfig(Options, TrainingArguments):  # type: ignore[misc]  # bf16 may be unset until the machine is known, as in TRL
    """Options of a GRPO run: a flat dataclass with TRL 1.16's names and defaults on top of transformers' TrainingArguments.

    An option that is accepted is honoured; one that cannot be is refused with a sentence that says what to do, at
    construction. `fields.py` and `inherited.py` declare them one by one, `checks.py` holds the rules between several.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012  transformers declares it so: names whose JSON text becomes a dict
        *TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "generation_kwargs", "alert_actions",
        "chat_template_kwargs", "vllm_deadlines", "transformers_continuous_batching_config",
    ]  # fmt: skip

    def __new__(cls, *args: Any, **kwargs: Any) -> GRPOConfig:
        """Refuse names that are not options before dataclass machinery sees them."""
        names = {item.name for item in fields(cls)}
        renamed = {name: f" {sentence}" for name, sentence in options.RENAMED.items()}
        hint = lambda name: renamed.get(name) or did_you_mean(name, names)
        if unknown := [name for name in kwargs if name not in names]:
            raise ArgumentTypeError(" ".join(f"{name} is not an option of GRPOConfig.{hint(name)}" for name in unknown))
        return super().__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """Options by name; transformers would ask accelerate's object for its `parallelism_config`, and mask a token that is unset."""
        held, self.parallelism_config = self.parallelism_config, None
        try:
            return {**super().to_dict(), "parallelism_config": held} | ({} if self.hub_token else {"hub_token": None})
        finally:
            self.parallelism_config = held

    def to_json_string(self) -> str:
        """As trackers log it; an algorithm or a detector that is an object is written as its `repr`."""
        return json.dumps(self.to_dict(), indent=2, default=repr)

    def __post_init__(self) -> None:
        try:
            self._settle()
        except ConfigError:
            raise
        except (TypeError, AttributeError, LookupError, OverflowError, ValueError) as error:
            raise ConfigError(checks.misfit(vars(self), get_type_hints(type(self)), error)) from error

    def _settle(self) -> None:
        """Check all options, and fill in derived ones."""
        _take_former_names(self)
        _take_mappings(self)
        changed = self._changed()
        checks.refuse_unsupported(changed)
        checks.refuse_bad_factories(self)
        checks.normalize(self)
        checks.refuse_bad_values(self)
        refuse_other_types(self)
        checks.refuse_contradictions(self, changed)
        checks.warn_of_levels(self)
        checks.settle_precision(self)
        checks.settle_sampler(self)
        self.sharding = settle_sharding(self)
        """Sharding of the model over ranks; None: each holds all of it."""
        context = settle_parallelism(self)
        self.use_cpu = self.use_cpu or is_on_cpu_with_others()
        with starting_on_a_free_port():
            join(cpu=self.use_cpu, backend=self.ddp_backend, seconds=self.ddp_timeout)  # before transformers would
            self._settle_as_transformers()
        self.context = expect_processes(context, self.world_size)
        """Ranks that compute each row together."""
        checks.refuse_unsupported({"accelerator_config": self.accelerator_config})  # which may have been a file
        if checks.is_default_accelerator(self.accelerator_config):
            changed.pop("accelerator_config", None)
        alerts.refuse_bad_alerts(self)
        checks.settle_asynchrony(self)
        checks.settle_batches(self)
        name_idle(changed, features_of(self), self, of_options=True)
        checks.warn_inert(changed)

    def _settle_as_transformers(self) -> None:
        """Settle the inherited options, and create the process group if there are several processes."""
        hidden = {name: vars(self)[name] for name in _NOT_FOR_TRANSFORMERS}
        vars(self).update(_NOT_FOR_TRANSFORMERS)
        try:
            with split_by_covey(self):
                super().__post_init__()
        except (ValueError, TypeError, AttributeError, LookupError, OSError) as error:  # for its own options
            raise ConfigError(str(error)) from error
        vars(self).update(hidden)

    @property
    def checkpoints_activations(self) -> bool:
        """True if activation checkpointing is on from the first step."""
        return bool(self.gradient_checkpointing) and not self.checkpoint_when_needed

    def _changed(self) -> dict[str, Any]:
        """Options that differ from their defaults, by name."""
        return {
            name: vars(self)[name]
            for name, default in options.defaults_of(type(self)).items()
            if options.is_changed(vars(self)[name], default)
        }


def _take_former_names(config: GRPOConfig) -> None:
    """Move the value of an option's former name to today's, with a FutureWarning. Raises ConfigError where both are given."""
    cap = config.vllm_importance_sampling_cap
    if cap is None:
        return
    if config.vllm_importance_sampling_clip_max not in (cap, GRPOConfig.vllm_importance_sampling_clip_max):
        raise ConfigError(
            "vllm_importance_sampling_cap and vllm_importance_sampling_clip_max are one option; give the second."
        )
    warnings.warn("vllm_importance_sampling_cap is now vllm_importance_sampling_clip_max.", FutureWarning, stacklevel=4)
    config.vllm_importance_sampling_clip_max, config.vllm_importance_sampling_cap = cap, None


def _take_mappings(config: GRPOConfig) -> None:
    """Turn arguments into dicts, JSON too. Raises ConfigError for arguments that are no mapping."""
    for name, value in vars(config).items():
        if not name.endswith("_kwargs") or value is None:
            continue
        with contextlib.suppress(ValueError):
            value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r} is no mapping of arguments; give a dict, or JSON of an object.")
        setattr(config, name, dict(value))
