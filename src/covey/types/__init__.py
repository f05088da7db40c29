"""Values that flow through a step, and metrics that know how they merge."""

from covey.types.callables import (
    Advantage as Advantage,
)
from covey.types.callables import (
    Aggregate as Aggregate,
)
from covey.types.callables import (
    Estimator as Estimator,
)
from covey.types.callables import (
    Objective as Objective,
)
from covey.types.callables import (
    Position as Position,
)
from covey.types.callables import (
    ReferenceRule as ReferenceRule,
)
from covey.types.callables import (
    Regularizer as Regularizer,
)
from covey.types.callables import (
    Reward as Reward,
)
from covey.types.callables import (
    Stage as Stage,
)
from covey.types.callables import (
    Stages as Stages,
)
from covey.types.callables import (
    Weight as Weight,
)
from covey.types.episodes import (
    EpisodeNotes as EpisodeNotes,
)
from covey.types.float64 import (
    precise as precise,
)
from covey.types.float64 import (
    widest_float as widest_float,
)
from covey.types.media import (
    Media as Media,
)
from covey.types.metrics import (
    Bound as Bound,
)
from covey.types.metrics import (
    EffectiveSize as EffectiveSize,
)
from covey.types.metrics import (
    Last as Last,
)
from covey.types.metrics import (
    Max as Max,
)
from covey.types.metrics import (
    Mean as Mean,
)
from covey.types.metrics import (
    Metric as Metric,
)
from covey.types.metrics import (
    Min as Min,
)
from covey.types.metrics import (
    Spread as Spread,
)
from covey.types.metrics import (
    Sum as Sum,
)
from covey.types.metrics import (
    merge_metrics as merge_metrics,
)
from covey.types.reports import (
    Alert as Alert,
)
from covey.types.reports import (
    Event as Event,
)
from covey.types.reports import (
    StepReport as StepReport,
)
from covey.types.reports import (
    TokenNumbers as TokenNumbers,
)
from covey.types.tokens import (
    TokenBatch as TokenBatch,
)
from covey.types.tokens import (
    Totals as Totals,
)
from covey.types.tokens import (
    over_spans as over_spans,
)
from covey.types.values import (
    Completion as Completion,
)
from covey.types.values import (
    Finish as Finish,
)
from covey.types.values import (
    Group as Group,
)
from covey.types.values import (
    Message as Message,
)
from covey.types.values import (
    Prompt as Prompt,
)
from covey.types.values import (
    Scores as Scores,
)
from covey.types.values import (
    ToolCall as ToolCall,
)
from covey.types.values import (
    of_policy as of_policy,
)
from covey.types.values import (
    stack_tokens as stack_tokens,
)
