"""Updates of the reference model towards the policy: a rule maps the report of a step to the mixing factor alpha.

After the step `reference <- (1 - alpha) reference + alpha policy`: 0 keeps it, 1 copies. TR-DPO, Gorbatovski et al. 2024.
"""

from typing import Annotated

from torch import Tensor

from covey.declared import Count, CountOrZero, NotNegative, Range, Share, checked_dataclass
from covey.types import ReferenceRule, StepReport


def keep(report: StepReport) -> float:
    """0: the reference stays what it was at the start."""
    return 0.0


@checked_dataclass(frozen=True)
class Every:
    """`alpha` at every `steps`-th optimizer step, counted from 1, else 0. TRL's `sync_ref_model` with its defaults.

    `alpha=1` copies (TR-DPO hard), below 1 it mixes (TR-DPO soft).
    """

    steps: Count = 512
    alpha: Annotated[float, Range(at_least=0, at_most=1, why="0 keeps the reference, 1 copies the policy.")] = 0.6

    def __call__(self, report: StepReport) -> float:
        return self.alpha if report.step % self.steps == 0 else 0.0


@checked_dataclass(frozen=True)
class FrozenAt:
    """1 at optimizer step `step`, else 0: a copy of the policy at that step, and until then of the start."""

    step: CountOrZero

    def __call__(self, report: StepReport) -> float:
        return 1.0 if report.step == self.step else 0.0


@checked_dataclass(frozen=True)
class EMA:
    """An exponential moving average of the policy: `1 - decay` at every step."""

    decay: Annotated[float, Range(at_least=0, at_most=1, why="0 copies the policy, 1 keeps the reference.")] = 0.99

    def __call__(self, report: StepReport) -> float:
        return 1.0 - self.decay


@checked_dataclass(frozen=True)
class WhenFar:
    """`alpha` after a step whose KL is above `kl`, else 0: the reference follows only a policy that walked away."""

    kl: NotNegative = 0.05
    alpha: Share = 1.0
    metric: str = "kl"

    def __call__(self, report: StepReport) -> float:
        return self.alpha if report[self.metric] > self.kl else 0.0


def averages(rule: ReferenceRule) -> bool:
    """True if a rule may mix the two, whose average is kept in float32 where the weights are of 16 bits; a copy is none."""
    return rule is not keep and not isinstance(rule, FrozenAt) and getattr(rule, "alpha", 0.5) not in (0.0, 1.0)


def mixed(reference: Tensor, policy: Tensor, alpha: float) -> Tensor:
    """`(1 - alpha) reference + alpha policy`, in the reference's shape."""
    return (1.0 - alpha) * reference + alpha * policy
