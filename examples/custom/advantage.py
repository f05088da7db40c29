"""An advantage of one's own: compare with the group's median, without dividing by the spread.

Use it: `GRPOTrainer(..., algorithm=mine)` · `--algorithm examples/custom/advantage.py:mine` ·
`--algorithm "dapo, advantage=examples/custom/advantage.py:from_median"`.
"""

from covey import algorithms as alg


def from_median(scores):
    """[P, G]; NaN (nobody scored) becomes 0."""
    median = scores.total.nanmedian(1, keepdim=True).values
    return (scores.total - median).nan_to_num(0.0)


mine = alg.grpo().replace(advantage=from_median)
