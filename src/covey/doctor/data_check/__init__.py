"""Faults of a data set of prompts, row by row, and a cleaned copy of it."""

from typing import TYPE_CHECKING

from covey.names import lazy

if TYPE_CHECKING:
    from covey.doctor.data_check.clean_copy import Cleaned, clean
    from covey.doctor.data_check.inspection import Inspection, inspect
    from covey.doctor.data_check.rows import Rows
    from covey.doctor.data_check.settings import Settings

__all__ = ["Cleaned", "Inspection", "Rows", "Settings", "clean", "inspect"]
_WHERE = {"clean_copy": "Cleaned clean", "inspection": "Inspection inspect", "rows": "Rows", "settings": "Settings"}
__getattr__ = lazy(__name__, _WHERE)
