"""The Hugging Face hub within bounds: where it cannot be reached, the cache alone is asked, at once and without retries."""

import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 4.0
_SILENCE_SECONDS = 90.0


def hub_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those keyword arguments of `from_pretrained` that its tokenizer and processor share with a model: revision, cache, token."""
    names = ("revision", "cache_dir", "token", "local_files_only")
    return {name: options[name] for name in names if options and options.get(name) is not None}


@contextmanager
def bounded_hub(name: str | Path) -> Iterator[bool]:
    """Context manager that puts hub libraries into offline mode while the hub cannot be reached. Yields False then.

    Local names, and libraries that the user has set offline, are left alone."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(name).expanduser().exists():
        yield True
        return
    if _is_reachable(constants.ENDPOINT):
        yield True
        return
    switches: list[Any] = [constants] + [
        sys.modules[module] for module in ("datasets.config",) if module in sys.modules
    ]
    before = [module.HF_HUB_OFFLINE for module in switches]
    for module in switches:
        module.HF_HUB_OFFLINE = True
    try:
        yield False
    finally:
        for module, was in zip(switches, before, strict=True):
            module.HF_HUB_OFFLINE = was


def limit_silence() -> None:
    """Limit the silence of huggingface_hub's requests, which wait for ever by themselves; a slow upload moves, and may take hours."""
    from huggingface_hub import get_session

    if get_session().timeout.read is None:
        get_session().timeout = _SILENCE_SECONDS


@functools.cache
def _is_reachable(endpoint: str) -> bool:
    """True if the endpoint answers within seconds, asked through the libraries' own HTTP session (with its proxies)."""
    answers: list[object] = []

    def ask() -> None:
        from huggingface_hub import get_session

        with suppress(Exception):  # no network, no name, no certificate: all of it means no
            answers.append(get_session().head(endpoint, timeout=_PATIENCE_SECONDS))

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    asking.start()
    asking.join(_PATIENCE_SECONDS)
    return bool(answers)
