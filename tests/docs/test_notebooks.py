"""The notebooks of the tutorials: stored without outputs, installed in Colab by their first cell, and run in a fresh kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covey import Run
from kit import rest_nightly

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
TRAINED = {"first-run.ipynb": "runs/first-notebook", "reading-a-run.ipynb": "runs/read-notebook"}
"""Folder of the run that a notebook makes."""


def cells(book: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(book.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def test_there_are_notebooks() -> None:
    assert {*TRAINED, "your-reward.ipynb"} <= {book.name for book in BOOKS}


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.name)
def test_a_notebook_is_stored_without_outputs(book: Path) -> None:
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells(book, "code")] == [([], None)] * len(
        cells(book, "code")
    )


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.name)
def test_the_first_cell_installs_in_colab_alone(book: Path) -> None:
    first = "".join(cells(book, "code")[0]["source"])
    assert 'if "google.colab" in sys.modules:\n    %pip install' in first
    assert "%pip" not in "".join(line for cell in cells(book, "code")[1:] for line in cell["source"])


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.name)
def test_links_of_a_notebook_lead_somewhere(book: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells(book, "markdown"))
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []


def executed(book: Path, folder: Path, **replaced: str) -> str:
    """The outputs of a notebook in a fresh kernel, each of `replaced` put in the place of its words."""
    import nbclient
    import nbformat

    opened = nbformat.read(book, as_version=4)  # type: ignore[no-untyped-call]
    for before, after in replaced.items():
        assert sum(cell.source.count(before) for cell in opened.cells) == 1
        for cell in opened.cells:
            cell.source = cell.source.replace(before, after)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        opened, timeout=600, startup_timeout=120, kernel_name="python3", resources=resources
    ).execute()
    shown = "".join(str(cell.get("outputs")) for cell in opened.cells)
    assert "Traceback" not in shown
    return shown


FEWER = {"first-run.ipynb": {'"max_steps": 25': '"max_steps": 3', '"test", 100': '"test", 20'}}
"""What a test that it runs takes less of; the last test runs it as it stands. In CI its page runs, in `test_python_blocks.py`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "book",
    rest_nightly(BOOKS, [book for book in BOOKS if book.name == "your-reward.ipynb"]),
    ids=lambda book: book.name,
)
def test_a_notebook_runs_in_a_fresh_kernel(book: Path, tmp_path: Path) -> None:
    shown = executed(book, tmp_path, **FEWER.get(book.name, {}))
    if book.name in TRAINED:
        run = Run(tmp_path / TRAINED[book.name])
        assert run.state == "finished"
        assert "<svg" in shown
    if book.name == "first-run.ipynb":
        assert re.search(r"problems: [\d.]+ before, [\d.]+ after", shown)


@pytest.mark.nightly
def test_the_first_run_of_the_notebook_learns(tmp_path: Path) -> None:
    shown = executed(FOLDER / "first-run.ipynb", tmp_path)
    before, after = map(float, re.findall(r"problems: ([\d.]+) before, ([\d.]+) after", shown)[0])
    assert after > before + 0.1
