"""The text of each token of a completion, from the tokenizer in the run's folder."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from covey.errors import RunFolderError
from covey.monitor.view.latest import Latest
from covey.runs import manifest
from covey.runs.storage import open_plain, read_bounded

_LOOK_BACK = 6
_MOST_BYTES = 100 << 20
_BROKEN = "\ufffd"


def tokenizer_file(run: Path) -> Path | None:
    """`tokenizer.json` of the newest checkpoint that has one, else of the model's folder; None when neither is here."""
    paths = sorted(run.glob("checkpoint-*/tokenizer.json"), key=_modified_at)
    for path in reversed(paths):
        if _is_plain(path):
            return path
    facts = manifest.read(run / manifest.NAME) or {}
    config, started_in = facts.get("config"), facts.get("working_folder")
    named = (config.get("model") or config.get("model_name_or_path")) if isinstance(config, dict) else None
    if not isinstance(named, str) or "\0" in named:
        return None
    path = Path(started_in if isinstance(started_in, str) else "/", named, "tokenizer.json")
    return path.resolve() if path.is_file() else None  # the user's own folder; a hub's cache is made of links


def _modified_at(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:  # pruned since
        return 0


def _is_plain(path: Path) -> bool:
    try:
        os.close(open_plain(path, depth=2))
    except OSError:
        return False
    return True


@functools.lru_cache(maxsize=4)
def _tokenizer(path: Path) -> Latest[Any]:
    return Latest(path, _load)


def _load(file: BinaryIO) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(read_bounded(file, _MOST_BYTES).decode())


def pieces(path: Path, token_ids: Sequence[int]) -> list[str]:
    """Text of each token [T]; of several tokens that form one character the last has it, the others are empty.

    RunFolderError for a tokenizer that cannot be read, or ids that are none of its.
    """
    try:
        now = _tokenizer(path).read()
        if now.content is None:
            raise RunFolderError(now.trouble or "it is gone")
        return _pieces(now.content, token_ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers' panics are no Exceptions
        raise RunFolderError(f"{path} does not give the text of these tokens ({error}).") from error


def _pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    out: list[str] = []
    start = shown = 0
    for end in range(1, len(token_ids) + 1):
        before = tokenizer.decode(list(token_ids[start:shown]), skip_special_tokens=False)
        now = tokenizer.decode(list(token_ids[start:end]), skip_special_tokens=False)
        if now.endswith(_BROKEN) and end < len(token_ids) and end - shown < _LOOK_BACK:
            out.append("")
            continue
        out.append(now[len(before) :])
        start, shown = shown, end
    return out
