"""Parts of 2026 beside numbers of the frameworks that have them, run once on the same inputs: verl 1dda039, Open-Instruct e6c3044."""

import dataclasses

import pytest
import torch
from signal_cases import MASK, OLD, T, batch, gradient, same

from covey import algorithms as alg
from covey.learner import Policy
from covey.learner.packing import rows_of
from covey.types import Scores
from kit import group, learner_of, tiny_model

# verl: gradient of compute_policy_loss_dro with dro_beta=0.3, token-mean
DRO = [
    [-0.1, -0.1003528, -0.0993014613, -0.1010302962, -0.0986585677],
    [0.0567076137, 0.0602108015, 0.0562416942, 0.0, 0.0],
    [-0.0308632543, -0.035833113, -0.0308538862, -0.0357428218, 0.0],
]
# Open-Instruct: weights of compute_rho_correction with rho_mask_tv_divergence, bounds 0 and 0.3, rho clamped at 2
VACO = [
    [0.0, 0.0, 0.577123174, 0.0, 0.0],
    [0.9119936085, 0.9689058683, 1.1257085231, 0.0, 0.0],
    [0.0, 0.7889183926, 0.5615652548, 0.0, 0.0],
]
# verl: compute_optimal_token_baseline_advantage, the first three rows a group; its handle_zero_tail is True by default
OTB = [
    [0.21106642547899312, 0.2816283159461558, 0.37661178307600973, 0.15419998786576694, 1.0],
    [-0.7889335745210069, -0.7183716840538442, -0.6233882169239903, 0.0, 0.0],
    [-0.2889335745210069, -0.21837168405384422, -0.12338821692399027, -0.34580001213423306, 0.0],
]


def test_dro_is_verls():
    value, loss = gradient(alg.dro(beta=0.3, correction=None), batch())
    same(value, DRO)
    assert loss == pytest.approx(0.6428400142084262, abs=1e-12)


def test_vaco_and_a_truncated_ratio_are_open_instructs():
    drawn = OLD - 0.6 * (2 * T + 0.3).sin() * torch.tensor([[1.0], [0.2], [1.3]], dtype=torch.float64)
    tokens = dataclasses.replace(batch(), sampler_logp=drawn)
    same(alg.VACO(0.3)(tokens) * alg.Correction("token", "truncate", 2.0)(tokens) * MASK, VACO)


def test_cispo_around_the_sampler_is_cispo_whose_old_policy_the_sampler_was():
    drawn = OLD + 0.4 * (T + 0.7).cos()
    told = dataclasses.replace(batch(), sampler_logp=torch.where(T == 3, torch.nan, drawn))
    own, _ = gradient(alg.cispo(correction=None).replace(objective=alg.CISPO(1.1, 0.9, anchor="sampler")), told)
    as_old = batch(torch.where(T == 3, OLD, drawn))
    expected, _ = gradient(alg.cispo(correction=None).replace(objective=alg.CISPO(1.1, 0.9)), as_old)
    torch.testing.assert_close(own, expected)


def test_the_optimal_token_baseline_is_verls():
    p = (-0.2 - (torch.arange(20, dtype=torch.float64).view(4, 5).sin() + 1)).exp()
    squared = 1 - 2 * p + p**2 + 0.3 * (1 - p) ** 2
    scores = Scores(
        per_function=torch.tensor([[1.0, 0.0, 0.5], [1.0, torch.nan, torch.nan]], dtype=torch.float64)[..., None],
        weights=torch.ones(1, dtype=torch.float64),
        mask=torch.arange(5) < torch.tensor([[[5], [3], [4]], [[2], [0], [0]]]),
        squared_score=torch.stack([squared[:3], torch.cat([squared[3:], torch.zeros(2, 5)])]),
    )
    judged = alg.OptimalTokenBaseline()(scores)
    torch.testing.assert_close(judged[0], torch.tensor(OTB, dtype=torch.float64))
    assert judged[1, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]  # a group of one has no baseline
    assert not judged[1, 1:].any()


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_learner_measures_the_squared_norm_of_a_tokens_gradient_by_the_logits(chunk):
    """Against autograd: log p of each drawn token by its logits at the sampling temperature."""
    model = tiny_model("gemma2").eval()
    policy = Policy(model, pad_id=0, temperature=0.8, logits_chunk=chunk)
    drawn = dataclasses.replace(group(["four", "5"]), advantages=torch.zeros(2))
    learner = learner_of(policy, torch.optim.SGD(model.parameters(), lr=0.0), max_completion_length=9)
    (noted,) = learner.annotate([drawn], alg.otb())
    for row, completion in zip(rows_of([drawn]), noted.completions, strict=True):
        start = len(row.prompt.token_ids)
        ids = torch.tensor([[*row.prompt.token_ids, *completion.token_ids.tolist()]])
        logits = (model(ids).logits[0, start - 1 : -1] / 0.8).detach().requires_grad_()
        logits.log_softmax(-1).gather(-1, completion.token_ids[:, None]).sum().backward()
        torch.testing.assert_close(completion.squared_score, logits.grad.square().sum(-1), rtol=1e-4, atol=1e-5)
        assert completion.old_logp is None
