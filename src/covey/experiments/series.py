"""A folder of several runs with the same options: claimed once, and continued by the same command."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config.options import RECIPE
from covey.errors import RunFolderError
from covey.files.bounded import read_text, yaml_of

NEVER = frozenset(
    {
        "from_run", "resume", "output_dir", "json", "dry_run", "print_config", "seeds", "config", "trust_source", "adapters",
        "share_base", "vary",
    }
)  # fmt: skip
"""Options of one call, not of the run."""


def claim(folder: Path, options: Mapping[str, Any], what: str) -> None:
    """Make the folder and write the options into it, secrets masked.

    Raises RunFolderError when it holds a single run, or `what` (such as "seeds") of other options.
    """
    import yaml

    from covey.runs.masking import mask
    from covey.runs.storage import write_atomically

    if (folder / "run.json").is_file():
        raise RunFolderError(f"{folder} holds a single run; choose another --output-dir for several.")
    masked = mask(dict(options))
    before = folder / RECIPE
    if before.is_file():
        recorded = yaml_of(read_text(before), str(before))[1] or {}
        changed = sorted(name for name in {*recorded, *masked} if recorded.get(name) != masked.get(name))
        if changed:
            raise RunFolderError(
                f"{folder} holds {what} of a run with other options ({', '.join(changed[:5])}); choose another --output-dir, or "
                "give the same options."
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(before, yaml.safe_dump(masked, sort_keys=False, allow_unicode=True).encode())


def make_way(place: Path) -> None:
    """Rename the folder of a run that was killed before its first checkpoint, so that the run can start again.

    Raises RunFolderError where it still trains, as where only the process that began it was killed.
    """
    from covey.runs import checkpoint
    from covey.runs.lock import FolderLock

    if not (place / "run.json").is_file() or checkpoint.checkpoints(place):
        return
    with FolderLock(place):
        number = 1
        while (aside := place.with_name(f"{place.name}.previous-{number}")).exists():
            number += 1
        place.rename(aside)


def again(words: Sequence[str], folder: str | Path) -> str:
    """The command that continues: the same, with the folder named."""
    named = any(word.startswith(("--output-dir", "--output_dir")) for word in words)
    return shlex.join(["covey", *words[1:], *([] if named else ["--output-dir", str(folder)])])
