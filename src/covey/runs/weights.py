"""Path of the weights that a user names: a model, an adapter, a checkpoint, or the newest checkpoint of a run."""

import os
import warnings
from pathlib import Path
from typing import Any

from covey.adapters import has_adapter
from covey.errors import CheckpointError, ModelError

FINAL = "model"
"""Folder inside a run for the weights that it ended with."""
SAVED = "saved_models"
"""Key of `run.json`: step of each model that was saved into the run's folder, by its place there; -1: of a former run, or dropped."""
_MODEL_FILES = ("config.json", "adapter_config.json")
_MEND = "covey checkpoints verify RUN names those that are whole, and repair mends what can be mended."


def model_folder(named: str) -> str:
    """The folder or hub id to load for what the user named.

    A run folder stands for the model that it ended with (`model/`), or else for its newest checkpoint, as where the run has gone on
    since. Raises ModelError for a folder that holds neither, CheckpointError for a checkpoint whose weights are not those that
    Covey wrote.
    """
    from covey.runs import manifest

    folder = Path(named).expanduser()
    if not folder.is_dir():
        return named
    saved = (manifest.read(folder / manifest.NAME) or {}).get(SAVED) or {}
    newest_step = _newest_step(folder) if saved else 0
    for candidate in (folder, folder / FINAL):
        is_older = saved.get(_place(folder, candidate), newest_step) < newest_step
        if any((candidate / name).is_file() for name in _MODEL_FILES) and not is_older:
            _expect_as_written(candidate)
            return str(candidate)
    from covey.runs import checkpoint  # with torch, which a command's first lines do not wait for

    newest = checkpoint.latest(folder, is_resumed=False)
    if newest is None:
        raise ModelError(f"{named} holds neither a model (config.json) nor a checkpoint of a run.")
    return str(newest)


def _newest_step(run: Path) -> int:
    from covey.runs import checkpoint

    return max(map(checkpoint.step_of, checkpoint.checkpoints(run)), default=0)


def note_saved(run: Path, folder: Path, step: int) -> None:
    """Write into `run.json` that the model in `folder`, one of those `model_folder` looks into, is of this step. OSError when the disk refuses."""
    from covey.runs import manifest

    place, run_json = _place(run, folder), manifest.read(run / manifest.NAME)
    if run_json is not None and place in (".", FINAL):
        saved = {**(run_json.get(SAVED) or {}), place: step}
        manifest.write(run / manifest.NAME, {**run_json, SAVED: saved})


def _place(run: Path, folder: Path) -> str:
    return os.path.relpath(folder.resolve(), run.resolve())


def _expect_as_written(folder: Path) -> None:
    """The weights of a checkpoint against its manifest; other files of it, such as a chat template, may be edited."""
    from covey.runs import checksums

    if not (folder / checksums.NAME).is_file():
        return  # no checkpoint, or one of which only the model was copied
    try:
        files = checksums.read(folder)["files"]
    except CheckpointError as error:
        if not any(folder.glob("covey_state.*")):
            return  # a manifest of another program
        raise CheckpointError(f"{folder} is no whole checkpoint: {error}. {_MEND}") from error
    for name, entry in files.items():
        is_weights = name.endswith((".safetensors", ".bin")) and not name.startswith("covey_state")
        if is_weights and (wrong := checksums.problem(folder, name, entry)):
            raise CheckpointError(f"{folder} is damaged: {wrong}. {_MEND}")


def names_to_write(model: Any) -> set[str]:
    """Names of the `state_dict` that PEFT writes of a model's adapters, with frozen factors and a base's embeddings; none without an adapter."""
    if not has_adapter(model):
        return set()
    from peft import get_peft_model_state_dict

    state, written = model.state_dict(), set[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in model.peft_config:
            written.update(map(id, get_peft_model_state_dict(model, state_dict=state, adapter_name=name).values()))
    return {name for name, value in state.items() if id(value) in written}
