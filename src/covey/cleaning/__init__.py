"""What is wrong with a data set of prompts, row by row; and a copy of it without that."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.cleaning.inspection import Inspection, inspect
    from covey.cleaning.rows import Rows
    from covey.cleaning.settings import Settings
    from covey.cleaning.writing import Cleaned, clean

_WHERE = {
    "Cleaned": "writing",
    "Inspection": "inspection",
    "Rows": "rows",
    "Settings": "settings",
    "clean": "writing",
    "inspect": "inspection",
}
__all__ = ["Cleaned", "Inspection", "Rows", "Settings", "clean", "inspect"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
