"""Figures of run folders: curves, reward shares, verdicts; in files, in notebooks and in a report to send."""

from covey.evaluation.figures.gather import Confusion as Confusion
from covey.evaluation.figures.gather import Shares as Shares
from covey.evaluation.figures.gather import figures_of as figures_of
from covey.evaluation.figures.picture import Picture as Picture
from covey.evaluation.figures.picture import plot as plot
from covey.evaluation.figures.run import Run as Run
