"""Detectors: small pure objects that map a `History` to an alert, or None. A function will do as well."""

from collections.abc import Callable, Mapping, Sequence

from covey.monitor.detectors.pace import DataDrift, Forgetting, RewardDrift, ThroughputDrop
from covey.monitor.detectors.policy import (
    DeadGroups,
    DiversityLoss,
    EntropyCollapse,
    EntropyExplosion,
    KLRunaway,
    RouterDrift,
    ToolCollapse,
)
from covey.monitor.detectors.rewards import Hacking, Plateau, RewardCollapse, RewardErrors, SlowConvergence
from covey.monitor.detectors.swings import Conflict, Swings
from covey.monitor.detectors.teachers import MemberDominates, MemberIdle, TeacherCollapse, TeacherLeak, TeacherWorse
from covey.monitor.detectors.text import (
    FormatLoss,
    LanguageCollapse,
    LengthCollapse,
    LengthExplosion,
    RepeatedText,
    Truncation,
)
from covey.monitor.detectors.updates import LargeUpdates, Mismatch, NonFinite, Spike, TinyUpdates
from covey.monitor.history import History
from covey.types import Alert

Detector = Callable[[History], Alert | None]


def standard(audits: Sequence[str] = (), weights: Mapping[str, float] | None = None) -> tuple[Detector, ...]:
    """One detector of each kind. `audits`: metrics that are not trained on, for `reward_hacking`; `weights`: of the rewards
    that are, by name, for `reward_conflict`.
    """
    return (
        Hacking(tuple(audits)), RewardCollapse(), NonFinite(), KLRunaway(), EntropyCollapse(), EntropyExplosion(),
        DiversityLoss(), DeadGroups(), LengthExplosion(), LengthCollapse(), Truncation(), RepeatedText(),
        FormatLoss(), Spike(), Spike("update/all", "update_spike"), LargeUpdates(), TinyUpdates(), Mismatch(),
        RouterDrift(), RewardErrors(), Swings(), Conflict(weights or {}), SlowConvergence(), Plateau(),
        ThroughputDrop(), DataDrift(), MemberDominates(), MemberIdle(), RewardDrift(), Forgetting(),
        LanguageCollapse(), ToolCollapse(), TeacherWorse(), TeacherCollapse(), TeacherLeak(),
    )  # fmt: skip
