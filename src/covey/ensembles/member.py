"""A member of an ensemble, as a user gives it: a model, an adapter, a checkpoint or an endpoint, with its role."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from covey.declared import Count, Positive, checked_dataclass
from covey.errors import ConfigError, did_you_mean
from covey.files.places import expect_model, refuse_missing

Role = Literal["sibling", "baseline", "rescue"]
"""Use of a member's completions: learnt from, compared with, or only where the policy failed throughout."""


@checked_dataclass(frozen=True, eq=False)
class Member:
    """A model whose completions join those of the policy.

    `Member("runs/b", role="sibling", samples=2)`, `Member(model, tokenizer=tokenizer)`,
    `Member("http://localhost:8000/v1", served_model_name="qwen")`. It is never trained.
    """

    model: Any
    """A folder, a run, a checkpoint, an adapter, a hub id, a loaded model, or the address of an OpenAI-compatible endpoint."""
    role: Role | None = None
    """`sibling`: its completions join with importance weights. `baseline`: their rewards move the group's mean, without a
    gradient. `rescue`: its right answers join groups in which the policy failed throughout. None: sibling for a model with the
    policy's tokenizer, rescue for any other."""
    samples: Count = 1
    """Completions that it writes for a prompt."""
    name: str | None = None
    """Name in metrics and `Completion.source`; by default the last part of its path."""
    tokenizer: Any = None
    """Tokenizer of a loaded model that did not come from a folder."""
    served_model_name: str | None = None
    """The model that an endpoint serves."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable with the endpoint's key."""
    request_seconds: Positive = 60.0
    """Longest time of one request to an endpoint."""

    def __post_init__(self) -> None:
        expect_model(self.model)
        if self.name is not None and (self.name == "policy" or not re.fullmatch(r"[\w.\-]+", self.name)):
            raise ConfigError(
                f"{self.called}: name={self.name!r} must be of letters, digits, dots, dashes, and not policy."
            )
        if self.is_endpoint and not self.served_model_name:
            raise ConfigError(f"{self.called} is an endpoint: say which model it serves, with served_model_name=NAME.")
        if self.is_endpoint and self.role == "sibling":
            raise ConfigError(
                f"{self.called}: an endpoint gives text, not log-probabilities of the policy's tokens, so it cannot be a sibling; "
                "take role=rescue or role=baseline."
            )
        if not self.is_endpoint and self.served_model_name:
            raise ConfigError(
                f"{self.called}: served_model_name belongs to an endpoint, whose address begins with http://."
            )
        if isinstance(self.model, (str, Path)) and not self.is_endpoint:
            refuse_missing(str(self.model), "model folder")

    @property
    def is_endpoint(self) -> bool:
        return isinstance(self.model, str) and self.model.startswith(("http://", "https://"))

    @property
    def short_name(self) -> str:
        """The given name, or one derived from the model's path: `b` for `runs/b/model`, `b-checkpoint-20` for `runs/b/checkpoint-20`."""
        if self.name is not None:
            return self.name
        if self.is_endpoint:
            text = str(self.served_model_name or urlsplit(self.model).hostname)
        elif isinstance(self.model, (str, Path)):
            text = str(self.model)
        else:
            text = str(getattr(getattr(self.model, "config", None), "_name_or_path", "") or type(self.model).__name__)
        parts = [part for part in Path(text).parts if part not in ("/", "model", ".", "..")] or ["model"]
        name = "-".join(parts[-2:]) if parts[-1].startswith("checkpoint-") else parts[-1]
        name = re.sub(r"[^\w.\-]", "-", name)
        return "member-policy" if name == "policy" else name

    @property
    def called(self) -> str:
        return f"ensemble member {str(self.model)[:80] if isinstance(self.model, (str, Path)) else type(self.model).__name__!r}"


def as_member(spec: Any) -> Member:
    """A member from a `Member`, text such as `runs/b,role=sibling,samples=2`, a mapping of options, or a loaded model."""
    if isinstance(spec, Member):
        return spec
    if isinstance(spec, str):
        model, *options = re.split(r",(?=\w+=)", spec)
        return _from_options({"model": model, **dict(option.split("=", 1) for option in options)}, spec)
    if isinstance(spec, Mapping):
        return _from_options(dict(spec), str(dict(spec)))
    return Member(spec)


def _from_options(options: dict[str, Any], shown: str) -> Member:
    names = [item.name for item in fields(Member)]
    for name in options:
        if name not in names:
            hint = did_you_mean(name, names) or f" It has {', '.join(names)}."
            raise ConfigError(f"ensemble member {shown}: {name} is not an option of a member.{hint}")
    if not options.get("model"):
        raise ConfigError(
            f"ensemble member {shown!r} names no model; give a folder, a hub id or an endpoint's address."
        )
    for name, kind in (("samples", int), ("request_seconds", float)):
        if isinstance(options.get(name), str):
            try:
                options[name] = kind(options[name])
            except ValueError as error:
                raise ConfigError(f"ensemble member {shown}: {name}={options[name]} is no number.") from error
    return Member(**options)
