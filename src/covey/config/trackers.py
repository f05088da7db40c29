"""Trackers that `report_to` may name, and the packages that they need. Light to import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Mapping, Sequence

from covey.errors import ConfigError, did_you_mean

_TRACKERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "tensorboard": (("tensorboard", "tensorboardX"), "covey[trackers]"),
    "wandb": (("wandb",), "covey[wandb]"),
    "trackio": (("trackio",), "covey[trackio]"),
    "mlflow": (("mlflow",), "covey[mlflow]"),
    "azure_ml": (("azureml",), "azureml-sdk"),
    "clearml": (("clearml",), "clearml"),
    "codecarbon": (("codecarbon",), "codecarbon"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dagshub": (("dagshub",), "dagshub"),
    "dvclive": (("dvclive",), "dvclive"),
    "flyte": (("flytekit",), "flytekit"),
    "neptune": (("neptune",), "neptune"),
    "swanlab": (("swanlab",), "swanlab"),
}
"""Trackers of transformers: their packages (one is enough), and the package to install."""


def _registered_trackers() -> Collection[str]:
    """Trackers that user code added to transformers' table, which then has been imported."""
    table = getattr(sys.modules.get("transformers.integrations.integration_utils"), "INTEGRATION_TO_CALLBACK", {})
    return set(table) - set(_TRACKERS)


def refuse_absent_trackers(names: str | Sequence[str] | None) -> None:
    """Raise ConfigError for an unknown tracker of `report_to`, or one whose package is not installed."""
    for name in (names,) if isinstance(names, str) else names or ():
        if name in ("none", "all") or name in _registered_trackers():
            continue
        if name not in _TRACKERS:
            hint = did_you_mean(str(name), _TRACKERS) or f" It is one of none, all, {', '.join(_TRACKERS)}."
            raise ConfigError(f"report_to={name!r} is no tracker.{hint}")
        packages, install = _TRACKERS[name]
        if not any(importlib.util.find_spec(package) for package in packages):
            raise ConfigError(f'report_to={name!r} needs the package {packages[0]}: pip install "{install}".')
