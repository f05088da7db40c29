"""The learner: optimizer steps from rollouts with advantages."""

from covey.learner.critic import Critic, ValueHead, ValueModel, no_critic
from covey.learner.learner import Learner
from covey.learner.optimizer import lower_rates
from covey.learner.policy import Policy
from covey.learner.reference import AdapterCopy, FrozenCopy, NoReference, Reference, frozen_copy
from covey.learner.served_teacher import ServedTeacher
from covey.learner.supervised import Supervised
from covey.learner.teacher import Teacher
from covey.learner.token_metrics import FIRST_UPDATE

__all__ = [
    "FIRST_UPDATE", "AdapterCopy", "Critic", "FrozenCopy", "Learner", "NoReference", "Policy", "Reference",
    "ServedTeacher", "Supervised", "Teacher", "ValueHead", "ValueModel", "frozen_copy", "lower_rates", "no_critic",
]  # fmt: skip
