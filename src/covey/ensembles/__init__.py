"""Ensembles: several models answer a prompt, and their answers are judged as one group; in training and at inference."""

from covey.ensembles.answers import Answer, Vote
from covey.ensembles.ensemble import Ensemble
from covey.ensembles.member import Member, Role
from covey.ensembles.metrics import Tally, member_metrics
from covey.ensembles.sampler import EnsembleSampler
from covey.ensembles.writers import Writer

__all__ = ["Answer", "Ensemble", "EnsembleSampler", "Member", "Role", "Tally", "Vote", "Writer", "member_metrics"]
