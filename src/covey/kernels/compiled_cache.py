"""Folder of compiled GPU code that outlives the process."""

import functools
import logging
import os
from pathlib import Path

from covey.kernels.compile import cache_folder

logger = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own variable; Triton's code goes to a folder below, unless TRITON_CACHE_DIR says otherwise."""


@functools.cache
def keep_compiled_code() -> Path | None:
    """Let torch.compile keep its code in the user's cache folder, where a later process finds it; torch's default is `/tmp`.

    Returns the folder; None if it cannot be written, or may be written by others. A folder from the environment stays.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    try:
        folder = cache_folder() / "compiled"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        logger.warning("GPU code is compiled again by every process that starts after a reboot: %s.", error)
        return None
    os.environ[VARIABLE] = str(folder)
    return folder
