"""A KL estimator of one's own: squared distance near the reference, linear far from it, with a coefficient that adapts.

Use it: `GRPOTrainer(..., algorithm=mine)` · `--algorithm examples/custom/kl.py:mine` ·
`--algorithm "grpo, kl=examples/custom/kl.py:huber_kl"`.
"""

from covey import algorithms as alg


def huber_kl(logp, ref_logp, bend=1.0):
    """[N, T]"""
    gap = (logp - ref_logp).abs()
    near = gap.clamp(max=bend)
    return 0.5 * near.square() + bend * (gap - near)


mine = alg.grpo().replace(kl=alg.KL(huber_kl, coefficient=alg.AdaptiveKL(target=0.05)))
