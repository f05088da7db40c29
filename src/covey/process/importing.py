"""Progress of the imports that take seconds: PyTorch, transformers, datasets. A line at once, a count on a terminal."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TextIO

from covey.process.counting import Counter

HEAVY = ("torch", "transformers", "datasets", "accelerate", "peft")
_LAST = ("torch", "transformers.modeling_utils")
"""Modules after which no long import is to come; a script that imports `datasets` first has the first of them only."""
_WHAT = "loading PyTorch and transformers"


class ImportProgress(MetaPathFinder):
    """Finder that finds nothing: it sees each import, and counts those that happen while a heavy package is loaded.
    A package that is only looked for is not announced.

    `roots` are the modules whose loading is shown. `header` is written once before the first of them, where the stream is
    no terminal too; an empty one is left out.
    """

    def __init__(self, roots: Sequence[str], counter: Counter, header: str, stream: TextIO | None = None) -> None:
        self._roots = set(roots)
        self._counter, self._header, self._stream = counter, header, stream
        self._depth = self._count = 0
        self._is_looking = False
        """True while the other finders look for a root."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._depth:
            self._count += 1
            self._counter(f"{_WHAT}, modules", self._count, None)
        if fullname not in self._roots or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._watched(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
        return spec

    def _announce(self) -> None:
        header, self._header = self._header, ""
        if header:
            stream = self._stream or sys.stderr
            try:
                stream.write(f"{header}\n")
                stream.flush()
            except (OSError, ValueError):  # the reader of the stream is gone
                return

    def _watched(self, load: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            self._announce()
            self._depth += 1
            try:
                load(module)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._counter.clear()

        return exec_module


def show_imports(counter: Counter | None = None, *, roots: Sequence[str] = HEAVY, header: str = _WHAT) -> None:
    """Show progress of this process's heavy imports: once, in the main process of a run, if they are still to come."""
    is_shown = any(isinstance(finder, ImportProgress) for finder in sys.meta_path)
    if is_shown or all(name in sys.modules for name in _LAST) or sys.stderr is None or not _is_main():
        return
    sys.meta_path.insert(0, ImportProgress(roots, counter or Counter(), header))


def _is_main() -> bool:
    """False in another rank than 0, and in a process that this program has started."""
    multiprocessing = sys.modules.get("multiprocessing")
    is_child = multiprocessing is not None and multiprocessing.parent_process() is not None
    return not is_child and int(os.environ.get("RANK", "0") or 0) == 0
