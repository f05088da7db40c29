"""Picture of several figures: returned by `run.plot()`, shown in a notebook, written by `covey plot`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from covey.errors import ConfigError, StorageError
from covey.evaluation.compare.run_data import read_runs
from covey.evaluation.figures.draw import as_svg, sheet_of
from covey.evaluation.figures.gather import Figure, figures_of
from covey.evaluation.figures.page import page_of

KINDS = (".svg", ".html", ".png", ".pdf")
_MATPLOTLIB = (".png", ".pdf")


@dataclass(frozen=True)
class Picture:
    """Figures of runs. A notebook shows it; `save` writes it."""

    titles: Sequence[str]
    """Names of the sides: runs that differ in the seed alone are one."""
    figures: Sequence[Figure]

    def save(self, path: str | Path) -> Path:
        """Write SVG, HTML, PNG or PDF, by the name's ending; the last two need matplotlib.

        Raises ConfigError for another ending or without matplotlib, StorageError when it cannot be written.
        """
        path = Path(path).expanduser()
        check_name(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix.lower() in _MATPLOTLIB:
                from covey.evaluation.figures.png import save

                save(self.figures, self.titles, path)
            else:
                path.write_text(self.as_html() if path.suffix.lower() == ".html" else self.as_svg(), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
        return path

    def as_svg(self) -> str:
        """One SVG of all figures."""
        return sheet_of(self.figures, self.titles)

    def as_html(self) -> str:
        """A self-contained HTML page."""
        name = " and ".join(self.titles[:4])
        return page_of(name, f"<h1>{escape(name)}</h1>{self._repr_html_()}")

    def _repr_html_(self) -> str:
        """For notebooks."""
        style = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem"
        drawn = "".join(f'<figure style="margin:0">{as_svg(figure, self.titles)}</figure>' for figure in self.figures)
        return f'<div style="{style}">{drawn}</div>'

    def __repr__(self) -> str:
        return f"Picture({', '.join(figure.title for figure in self.figures)})"


def check_name(path: Path) -> None:
    """Raise ConfigError for a file name whose ending is no kind of picture."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"{path} has no ending that says what to write; use one of {', '.join(KINDS)}.")


def plot(folders: str | Path | Sequence[str | Path], metrics: Sequence[str] = (), *, each: bool = False) -> Picture:
    """Figures of one or several runs, or folders of runs; `each` draws seeds apart.

    Raises RunFolderError for what is no run, ConfigError for a metric that no run has.
    """
    named = [folders] if isinstance(folders, str | Path) else list(folders)
    if not named:
        raise ConfigError("There is no run to draw; give run folders: covey plot runs/a.")
    runs = [run for folder in named for run in read_runs(str(folder))]
    return Picture(*figures_of(runs, metrics, is_each=each))
