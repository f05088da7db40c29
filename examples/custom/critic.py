"""A critic of one's own: PPO whose value head learns by a Huber loss instead of clipped squares.

Use it: `GRPOTrainer(..., algorithm=mine)` · `--algorithm examples/custom/critic.py:mine` ·
`--algorithm "ppo, critic=examples/custom/critic.py:huber_error"`.
"""

import torch

from covey import algorithms as alg


def huber_error(tokens):
    """[N, T], the error of each token's value."""
    return torch.nn.functional.huber_loss(tokens.values, tokens.returns, reduction="none")


mine = alg.ppo().replace(critic=alg.Critic(error=huber_error, coefficient=0.5))
