"""Faults of a data set of prompts, row by row, and a cleaned copy of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.doctor.data_check.clean_copy import Cleaned, clean
    from covey.doctor.data_check.inspection import Inspection, inspect
    from covey.doctor.data_check.rows import Rows
    from covey.doctor.data_check.settings import Settings

_WHERE = {
    "Cleaned": "clean_copy",
    "Inspection": "inspection",
    "Rows": "rows",
    "Settings": "settings",
    "clean": "clean_copy",
    "inspect": "inspection",
}
__all__ = ["Cleaned", "Inspection", "Rows", "Settings", "clean", "inspect"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
