"""`python -OO` strips the docstrings that transformers reads: said in one sentence before anything is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_python_with_docstrings_stripped_is_refused_in_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-OO", "-m", "covey", "train", "demo"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: python -OO strips docstrings, which transformers needs; use python -O, or neither.\n"


def test_a_script_with_docstrings_stripped_is_told_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-OO", "-c", "from covey import GRPOTrainer"], capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1].startswith("covey.errors.ConfigError: python -OO strips docstrings")


@pytest.mark.nightly
def test_python_without_assertions_works() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", "from covey import GRPOTrainer"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
