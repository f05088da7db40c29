"""Path of the weights that a user names: a model, an adapter, a checkpoint, or the newest checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from covey.errors import ModelError

FINAL = "model"
"""Folder inside a run for the weights that it ended with."""
_MODEL_FILES = ("config.json", "adapter_config.json")


def model_folder(named: str) -> str:
    """The folder or hub id to load for what the user named.

    A run folder stands for the model that it ended with (`model/`), or else for its newest checkpoint. Raises ModelError
    for a folder that holds neither.
    """
    folder = Path(named).expanduser()
    if not folder.is_dir():
        return named
    for candidate in (folder, folder / FINAL):
        if any((candidate / name).is_file() for name in _MODEL_FILES):
            return str(candidate)
    from covey.runs import checkpoint

    newest = checkpoint.latest(folder)
    if newest is None:
        raise ModelError(f"{named} holds neither a model (config.json) nor a checkpoint of a run.")
    return str(newest)
