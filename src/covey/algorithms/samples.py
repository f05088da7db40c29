"""Made-up steps on which a part can be tried before a model is: seeded, small, with every field filled."""

import torch
from torch import Tensor

from covey.types import Scores, TokenBatch


def made_tokens(
    *,
    prompts: int = 3,
    group_size: int = 4,
    length: int = 7,
    drift: float = 0.3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    rubbish: float = 1.0,
) -> TokenBatch:
    """`prompts * group_size` completions of different lengths, one of them without any token that counts, gaps inside others.

    `drift` is the spread of `logp - old_logp`; 0 is on-policy. Off the mask stand random numbers of size `rubbish`. `logp`,
    `entropy` and `values` take gradients.
    """
    rng = torch.Generator().manual_seed(seed)
    rows = prompts * group_size
    noise = lambda scale: scale * torch.randn(rows, length, generator=rng, dtype=torch.float64)
    logp = -noise(1.0).abs() - 0.05
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=rng)
    mask &= torch.rand(rows, length, generator=rng) > 0.15
    mask[0] = True
    mask[rows // 2] = False
    fields = {
        "logp": logp,
        "old_logp": logp - noise(drift),
        "sampler_logp": logp - noise(drift) - noise(0.02),
        "ref_logp": logp - noise(0.3),
        "entropy": noise(1.0).abs(),
        "values": noise(1.0),
        "old_values": noise(1.0),
        "returns": noise(1.0),
    }
    off = {name: torch.where(mask, value, noise(rubbish)).to(dtype) for name, value in fields.items()}
    leaves = {name: off.pop(name).requires_grad_() for name in ("logp", "entropy", "values")}
    if drift == 0.0:
        off["old_logp"] = leaves["logp"].detach().clone()
        off["sampler_logp"] = leaves["logp"].detach().clone()
    advantages = torch.randn(rows, 1, generator=rng, dtype=torch.float64).to(dtype)
    group = torch.arange(prompts).repeat_interleave(group_size)
    of_teacher = {
        "teacher_logp": torch.where(mask, logp.detach() - noise(0.3), noise(rubbish)).to(dtype),
        "teacher_distance": torch.where(mask, noise(0.3).abs(), noise(rubbish)).to(dtype).requires_grad_(),
        "teacher_weight": torch.where(mask, noise(0.3).abs(), noise(rubbish).abs()).to(dtype),
        "teacher_mask": torch.arange(rows) % 5 != 2,
    }
    observed = ~mask & (mask.cumsum(-1) > 0)
    answers = {"observed": observed, "observed_logp": torch.where(observed, logp, 0.0).to(dtype)}
    return TokenBatch(**leaves, **off, **of_teacher, **answers, advantages=advantages, mask=mask, group=group)


def made_scores(
    rewards: Tensor | None = None,
    *,
    prompts: int = 3,
    group_size: int = 4,
    length: int = 6,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Scores:
    """Scores of `rewards` [P, G, R] (random ones where None), with lengths, a critic's values and greedy rewards."""
    rng = torch.Generator().manual_seed(seed)
    if rewards is None:
        rewards = torch.rand(prompts, group_size, 1, generator=rng, dtype=torch.float64)
    prompts, group_size, functions = rewards.shape
    lengths = torch.randint(1, length + 1, (prompts, group_size, 1), generator=rng)
    values = torch.randn(prompts, group_size, length, generator=rng, dtype=torch.float64)
    squared_score = torch.rand(prompts, group_size, length, generator=rng, dtype=torch.float64)
    return Scores(
        per_function=rewards.to(dtype),
        weights=torch.ones(functions, dtype=dtype),
        mask=torch.arange(length) < lengths,
        values=values.to(dtype),
        squared_score=squared_score.to(dtype),
        greedy=torch.full((prompts,), 0.5, dtype=dtype),
    )
