"""Result of a forward pass of the learner."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from covey.learner.expert_choices import Balance
from covey.learner.packing import PaddedRows
from covey.learner.shared_prompt import SharedRows


@dataclass(frozen=True, eq=False)
class Measured:
    """Result of one forward pass over N completions."""

    logp: Tensor
    """[N, T]"""
    entropy: Tensor
    """[N, T], zeros unless requested."""
    hidden: Tensor
    """[M, D], the hidden states that predicted the completion tokens, for value heads."""
    rows: PaddedRows | SharedRows
    distance: Tensor | None = None
    """[N, T], distance to another model over the whole vocabulary."""
    teacher_distance: Tensor | None = None
    """[N, T], distance to a teacher, if one was given."""
    teacher_weight: Tensor | None = None
    """[N, T], weights of the teacher, if it has some."""
    teacher_logp: Tensor | None = None
    """[N, T], the teacher's log-probabilities of the tokens, if it measures them."""
    teacher_overlap: Tensor | None = None
    """[N, T], share of the likeliest tokens that policy and teacher share, where it is measured."""
    teacher_span: Tensor | None = None
    """[N, T], spans of text that a teacher of another tokenizer shares with the policy, as in `TokenBatch`."""
    teacher_mask: Tensor | None = None
    """[N] bool, rows that the teacher can teach, if one was given."""
    balance: Balance | None = None
    """Sums of the load-balancing loss of a mixture-of-experts model."""
    routing: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars about the experts' loads, and about choices that differ from the sampler's (`routing_metrics`)."""
