"""The page says of every causal class of transformers what it gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from causal_classes import KINDS
from causal_table import ROLLOUTS, verdict_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROWS = [
    line for line in PAGE.read_text().splitlines() if any(line.startswith(f"| {way} |") for way in ROLLOUTS.values())
]
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT's, which would be taken for a refusal
QUICK = ("qwen2", "qwen3_5_text", "bloom", "gemma3n")
"""Each word of a column; the ways of plain transformers are those of test_agreement."""


def tier(kind):
    return kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.nightly)


def row_of(kind):
    (row,) = (row for row in ROWS if kind in re.findall(r"`([^`]+)`", row.split("|")[5]))
    return row


def test_every_class_stands_in_one_row():
    assert [kind for kind in KINDS if row_of(kind)] == list(KINDS)


@pytest.mark.parametrize("kind", [tier(kind) for kind in KINDS])
def test_a_class_gets_what_the_page_says(kind):
    """Never a raw exception, and never log-probabilities of another policy."""
    assert row_of(kind).startswith(verdict_of(kind).begin())
