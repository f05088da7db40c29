"""A notebook in a real Jupyter kernel: what its cells show while a run trains, and of the run afterwards."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import covey

pytestmark = pytest.mark.nightly  # a kernel imports everything anew

SETUP = """
import covey
from datasets import Dataset
from transformers.utils.notebook import NotebookProgressCallback

def short(completions, **columns):
    return [-float(len(text)) for text in completions]

def train(folder, callbacks=(), **changed):
    args = covey.GRPOConfig(folder, max_steps=3, per_device_train_batch_size=4, num_generations=4, learning_rate=1e-3,
                            max_completion_length=4, logging_steps=1, report_to="none", save_strategy="no", **changed)
    rows = Dataset.from_list([{"prompt": f"{n} + 2 ="} for n in range(8)])
    covey.GRPOTrainer("demo", short, args, rows, callbacks=list(callbacks)).train()
"""
CELLS = {
    "setup": SETUP,
    "lines": "train('lines')",
    "display": "train('display', [NotebookProgressCallback()], disable_tqdm=True)",
    "run": "covey.Run('lines')",
    "plot": "covey.Run('lines').plot('reward', 'entropy')",
}


class Cell(NamedTuple):
    outputs: list[Any]
    """Below the cell once it has ended."""
    messages: list[tuple[str, Any]]
    """The kernel's messages on the way, (kind, content)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def cells(folder: Path) -> dict[str, Cell]:
    import nbclient
    import nbformat

    class Reader(nbclient.NotebookClient):
        """Runs the cells and keeps every message of the kernel."""

        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            cell.metadata.setdefault("told", []).append((msg["msg_type"], msg["content"]))
            return super().process_message(msg, cell, cell_index)

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    Reader(
        book, timeout=280, startup_timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return {name: Cell(cell.outputs, cell.metadata["told"]) for name, cell in zip(CELLS, book.cells, strict=True)}


def html_of(cell: Cell, kind: str) -> str:
    """What the one output of this kind shows."""
    (output,) = (one for one in cell.outputs if one.output_type == kind)
    return str(output.data["text/html"])


def test_a_cell_that_trains_prints_a_line_at_the_end_of_each_step(cells: dict[str, Cell]) -> None:
    told = [content["text"] for kind, content in cells["lines"].messages if kind == "stream"]
    steps = [text for text in told if text.startswith("step ")]
    assert [text.split("  ")[0] for text in steps] == ["step 1/3", "step 2/3", "step 3/3"]  # a message each
    assert all(text.count("\n") == 1 and "reward -" in text and "\x1b" not in text for text in steps)


def test_one_display_follows_the_steps_and_replaces_the_lines(cells: dict[str, Cell], folder: Path) -> None:
    shown = [
        content["data"]["text/html"] for kind, content in cells["display"].messages if kind.endswith("display_data")
    ]
    listed = [len(re.findall(r"<td>(\d)</td>", html)) for html in shown]  # steps, in each version of the display
    assert list(dict.fromkeys(listed)) == [0, 1, 2, 3]
    last = html_of(cells["display"], "display_data")
    assert last == shown[-1]
    assert "[3/3" in last
    losses = [f"{row['loss']:.6f}" for row in covey.Run(folder / "display").metrics]
    assert re.findall(r"<td>(-?\d+\.\d+)</td>", last) == losses
    assert not any("step 1/3" in str(output) for output in cells["display"].outputs)


def test_a_run_as_the_last_line_of_a_cell_is_a_table_and_curves(cells: dict[str, Cell], folder: Path) -> None:
    shown = ET.fromstring(html_of(cells["run"], "execute_result"))
    table = {row[0].text: row[1].text for row in shown.iter("tr")}
    assert (table["state"], table["step"], table["folder"]) == ("finished", "3", "lines")
    assert table["reward"] == f"{covey.Run(folder / 'lines').metrics[-1]['reward']:.4g}"
    assert len(list(shown.iter("{http://www.w3.org/2000/svg}svg"))) == 2


def test_a_plot_shows_a_figure_a_metric_and_leaves_the_page_around_it_as_it_is(cells: dict[str, Cell]) -> None:
    shown = ET.fromstring(html_of(cells["plot"], "execute_result"))
    figures = list(shown.iter("{http://www.w3.org/2000/svg}svg"))
    assert [figure.get("aria-label") for figure in figures] == ["training reward by step", "entropy by step"]
    for figure in figures:
        assert len(figure.findall("{http://www.w3.org/2000/svg}circle")) == 3  # a dot a step
        style = figure.findtext("{http://www.w3.org/2000/svg}style") or ""
        assert {rule.split()[0] for rule in re.findall(r"([^{}]+)\{[^{}]*\}", style)} == {".covey", "svg:root"}
