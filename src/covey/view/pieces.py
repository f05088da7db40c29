"""The text of each token of a completion, from the tokenizer that lies beside the run."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LOOK_BACK = 6
_BROKEN = "\ufffd"


def tokenizer_file(run: Path) -> Path | None:
    """`tokenizer.json` of the newest checkpoint that has one, else of the model's folder; None when neither is here."""
    found = sorted(run.glob("checkpoint-*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    if found:
        return found[-1]
    try:
        config = json.loads((run / "run.json").read_bytes()).get("config", {})
    except (OSError, ValueError):
        return None
    named = config.get("model") or config.get("model_name_or_path") or ""
    path = Path(str(named)) / "tokenizer.json"
    return path if named and path.is_file() else None


@functools.lru_cache(maxsize=4)
def _load(path: str, changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def pieces(path: Path, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text [T]; a token that only completes a character has it, the ones before it are empty."""
    tokenizer = _load(str(path), path.stat().st_mtime_ns)
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
