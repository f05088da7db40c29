"""Files `step-000010.parquet` of a folder, one a step: their names, whole writes, and the removal of later ones."""

import re
from pathlib import Path
from typing import Any

from covey.runs.storage import refuse_link, write_atomically

_FILE = re.compile(r"step-(\d+)\.parquet")


def path_of(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step-{step:06d}.parquet"


def files(folder: Path, pattern: re.Pattern[str] = _FILE) -> list[tuple[int, Path]]:
    """(step, file) of the files on the disk that have such names, in order."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    return sorted((int(match[1]), path) for path in paths if (match := pattern.fullmatch(path.name)))


def steps(folder: Path) -> list[int]:
    """Steps whose file is on the disk, in order."""
    return [step for step, _ in files(folder)]


def truncate_to(folder: Path, step: int, pattern: re.Pattern[str] = _FILE) -> None:
    """Remove the files of later steps, which a resumed run will write again."""
    for later, path in files(folder, pattern):
        if later > step:
            path.unlink(missing_ok=True)


def write_table(path: Path, table: Any, compression: str = "zstd") -> Path:
    """Write a table of pyarrow as Parquet, whole or not at all, in a folder that is made. OSError when the disk refuses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    refuse_link(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression=compression)
    write_atomically(path, content.getvalue())
    return path
