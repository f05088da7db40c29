"""Figures of run folders: curves, reward shares, verdicts; in files, in notebooks and in a report to send."""

from covey.figures.gather import Confusion as Confusion
from covey.figures.gather import Shares as Shares
from covey.figures.gather import figures_of as figures_of
from covey.figures.picture import Picture as Picture
from covey.figures.picture import plot as plot
from covey.figures.run import Run as Run
