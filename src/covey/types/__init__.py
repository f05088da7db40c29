"""Values that flow through a step, and metrics that know how they merge."""

from covey.types.callables import (
    Advantage,
    Aggregate,
    Estimator,
    Objective,
    Position,
    ReferenceRule,
    Regularizer,
    Reward,
    Stage,
    Stages,
    Weight,
)
from covey.types.episodes import EpisodeNotes, ToolCall
from covey.types.media import Media
from covey.types.metrics import (
    Bound,
    EffectiveSize,
    Last,
    Max,
    Mean,
    Metric,
    Min,
    RunningTotal,
    Spread,
    Sum,
    lowest_passing,
    merge_metrics,
    precise,
    reaches,
    widest_float,
)
from covey.types.reports import Alert, Event, StepReport, TokenNumbers
from covey.types.tokens import TokenBatch, Totals, over_spans
from covey.types.values import Completion, Finish, Group, Message, Prompt, Scores, of_policy, stack_tokens

__all__ = [
    "Advantage", "Aggregate", "Alert", "Bound", "Completion", "EffectiveSize", "EpisodeNotes", "Estimator", "Event",
    "Finish", "Group", "Last", "Max", "Mean", "Media", "Message", "Metric", "Min", "Objective", "Position", "Prompt",
    "ReferenceRule", "Regularizer", "Reward", "RunningTotal", "Scores", "Spread", "Stage", "Stages", "StepReport",
    "Sum", "TokenBatch", "TokenNumbers", "ToolCall", "Totals", "Weight", "lowest_passing", "merge_metrics", "of_policy",
    "over_spans", "precise", "reaches", "stack_tokens", "widest_float",
]  # fmt: skip
