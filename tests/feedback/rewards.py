"""Rewards that say what may not be lost."""

import re

from covey.demo.task import text_of


def form(completions, **columns):
    """1.0 where the answer ends with `#### ` and a number, right or wrong."""
    return [float(bool(re.search(r"####\s*-?\d+\s*$", text_of(one).strip()))) for one in completions]
