"""A regularizer of one's own: an entropy bonus only where the model was sure.

Use it: `GRPOTrainer(..., algorithm=mine)` · `--algorithm examples/custom/regularizer.py:mine` ·
`--algorithm "grpo, regularizer=examples/custom/regularizer.py:wake_up"`.
"""

from covey import algorithms as alg


def wake_up(tokens, weight=0.01, below=0.5):
    """[N, T], already weighted; the library divides."""
    sure = tokens.entropy.detach() < below
    return -weight * tokens.entropy * sure


mine = alg.grpo().replace(regularizers=(wake_up,))
