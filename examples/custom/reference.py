"""A reference rule of one's own: the reference model follows the policy only after it has walked away.

Use it: `GRPOTrainer(..., algorithm=mine)` · `--algorithm examples/custom/reference.py:mine` ·
`--algorithm "grpo, reference=examples/custom/reference.py:follow_when_far"`.
"""

from covey import algorithms as alg


def follow_when_far(report):
    """alpha: reference <- (1 - alpha) reference + alpha policy."""
    return 0.6 if report["kl"] > 0.05 else 0.0


mine = alg.grpo().replace(reference=follow_when_far)
