"""A batch with a teacher's signal by token, and the gradient of a loss on it."""

import torch

from covey.types import TokenBatch, Totals

T = torch.arange(15, dtype=torch.float64).view(3, 5)
LOGP = -0.2 - (T.sin() + 1)
TEACHER = -0.3 - ((1.7 * T).cos() + 1)
OLD = LOGP + 0.1 * (3 * T).sin()
MASK = torch.arange(5) < torch.tensor([[5], [3], [4]])
REWARD = torch.tensor([[1.2], [-0.7], [0.4]], dtype=torch.float64)


def batch(old=OLD, mask=None):
    return TokenBatch(
        logp=LOGP.clone().requires_grad_(),
        old_logp=old,
        advantages=REWARD,
        mask=MASK,
        group=torch.tensor([0, 0, 0]),
        teacher_logp=TEACHER,
        teacher_mask=torch.ones(3, dtype=torch.bool) if mask is None else torch.tensor(mask),
    )


def gradient(algorithm, tokens):
    loss = algorithm.loss(tokens, Totals.of(tokens.mask, tokens.group, 5))
    return torch.autograd.grad(loss, tokens.logp)[0], loss.item()


def same(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=6e-11)
