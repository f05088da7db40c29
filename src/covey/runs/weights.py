"""Path of the weights that a user names: a model, an adapter, a checkpoint, or the newest checkpoint of a run."""

from pathlib import Path

from covey.errors import CheckpointError, ModelError

FINAL = "model"
"""Folder inside a run for the weights that it ended with."""
_MODEL_FILES = ("config.json", "adapter_config.json")
_MEND = "covey checkpoints verify RUN names those that are whole, and repair mends what can be mended."


def model_folder(named: str) -> str:
    """The folder or hub id to load for what the user named.

    A run folder stands for the model that it ended with (`model/`), or else for its newest checkpoint. Raises ModelError
    for a folder that holds neither, CheckpointError for a checkpoint whose weights are not those that Covey wrote.
    """
    folder = Path(named).expanduser()
    if not folder.is_dir():
        return named
    for candidate in (folder, folder / FINAL):
        if any((candidate / name).is_file() for name in _MODEL_FILES):
            _expect_as_written(candidate)
            return str(candidate)
    from covey.runs import checkpoint

    newest = checkpoint.latest(folder)
    if newest is None:
        raise ModelError(f"{named} holds neither a model (config.json) nor a checkpoint of a run.")
    return str(newest)


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
