"""Environments of the library verifiers (Prime Intellect, 0.1) by name: `verifiers:gsm8k` as a data set of its tasks."""

from typing import Any

from covey.errors import ConfigError, DataError, first_line, needed

SPLITS = ("train", "test")


def environment(name: str, **options: Any) -> Any:
    """The environment `verifiers.load_environment(name, **options)`. Raises ConfigError without the library or for a name that it cannot load."""
    with needed("verifiers: environments need verifiers", "verifiers"):
        import verifiers
    if not hasattr(verifiers, "load_environment"):
        raise ConfigError(
            f"verifiers {getattr(verifiers, '__version__', '')} has no load_environment; pip install 'covey[verifiers]'."
        )
    try:
        return verifiers.load_environment(name, **options)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"verifiers cannot load the environment {name!r}: {first_line(error)}") from error


def rows(source: Any, split: str = "train") -> Any:
    """The tasks of an environment (an object or a name) as a `datasets.Dataset`: `prompt`, `answer`, `example_id`, and its own columns.

    `split`: `train`, or `test` for its evaluation set. Raises DataError for another one, or for one that it has not.
    """
    if split not in SPLITS:
        raise DataError(f"verifiers environments have the splits {' and '.join(SPLITS)}, not {split!r}.")
    made = environment(source) if isinstance(source, str) else source
    try:
        return made.get_dataset() if split == "train" else made.get_eval_dataset()
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"The verifiers environment {made.env_id or made!r} has no {split} data set: {first_line(error)}"
        ) from error
