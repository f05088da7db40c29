"""Each role of a member has the gradient that one computes by hand, from plain forward passes and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.ensembles import Ensemble, Member
from kit import tiny_model, tiny_tokenizer

G, K = 3, 2


class Recorder:
    """A reward that remembers which tokens it was shown; `score(call, place)` says what they get."""

    def __init__(self, score: Callable[[int, int], float]) -> None:
        self.score, self.calls = score, []
        self.__name__ = "recorder"

    def __call__(self, completions, completion_ids, **columns):
        self.calls.append([list(ids) for ids in completion_ids])
        return [self.score(len(self.calls) - 1, i) for i in range(len(completions))]


def centred(scores):
    """Reward minus the group's mean."""
    return scores.total - scores.total.nanmean(-1, keepdim=True)


def step(tmp_path, reward, role, *, weight=None, threshold=0.5, **options):
    """One step of plain gradient descent at rate 1: the gradient of each parameter, and the run."""
    policy, member, tokenizer = tiny_model(), tiny_model(seed=3), tiny_tokenizer()
    args = {
        "per_device_train_batch_size": G, "num_generations": G, "max_steps": 1, "max_completion_length": 5, "optim": "sgd",
        "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "report_to": "none", "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    trainer = GRPOTrainer(
        policy,
        reward,
        GRPOConfig(str(tmp_path), **{**args, **options}),
        Dataset.from_list([{"prompt": "2 + 2 ="}]),
        processing_class=tokenizer,
        algorithm=alg.Algorithm(advantage=centred, objective=alg.Clipped(), aggregate=alg.token_mean),
        ensemble=Ensemble(
            [Member(member, role=role, samples=K, tokenizer=tokenizer, name="peer")],
            threshold=threshold,
            weight=weight or alg.MemberWeight(),
        ),
    )
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trainer.train()
    gradient = {name: before[name] - p.detach() for name, p in policy.named_parameters()}
    prompt = tokenizer("2 + 2 =").input_ids
    return gradient, trainer, prompt, member


def logps(model, prompt: list[int], ids: list[int]) -> Tensor:
    """[T], log-probabilities of a completion by a plain forward pass."""
    tokens = torch.tensor([prompt + ids])
    logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def by_hand(prompt, completions, advantages, weights=None) -> dict[str, Tensor]:
    """Gradient of `-sum_i A_i sum_t w_it log pi(y_it) / tokens` at the policy before the step."""
    policy = tiny_model()
    loss, tokens = torch.zeros(()), sum(len(ids) for ids in completions)
    for i, (ids, advantage) in enumerate(zip(completions, advantages, strict=True)):
        weight = 1.0 if weights is None else weights[i]
        loss = loss - (advantage * weight * logps(policy, prompt, ids)).sum() / tokens
    loss.backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def assert_same(found, expected):
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-4  # there is a gradient to compare
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-3, msg=lambda said, n=name: f"{n}: {said}")


def test_a_sibling_joins_with_the_policys_probability_over_its_own_truncated(tmp_path):
    reward = Recorder(lambda call, i: float(i % 2))  # policy 0 1 0, sibling 1 0
    high = 1.005
    found, _, prompt, member = step(tmp_path, reward, "sibling", weight=alg.MemberWeight(high=high, drift=None))
    (completions,) = reward.calls
    assert len(completions) == G + K
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    with torch.no_grad():
        ratios = [(logps(tiny_model(), prompt, ids) - logps(member, prompt, ids)).exp() for ids in completions[G:]]
    flat = torch.cat(ratios)
    assert (flat > high).any()  # truncation acts on some tokens
    assert (flat < high).any()
    weights = [*[1.0] * G, *[ratio.clamp(max=high) for ratio in ratios]]
    assert_same(found, by_hand(prompt, completions, rewards - rewards.mean(), weights))


def test_a_sibling_of_negative_advantage_that_the_policy_would_hardly_write_is_filtered(tmp_path):
    reward = Recorder(lambda call, i: float(i % 2))
    found, trainer, prompt, member = step(tmp_path, reward, "sibling", weight=alg.MemberWeight(high=9.0, drift=0.0))
    (completions,) = reward.calls
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    weights: list = [1.0] * G
    with torch.no_grad():
        for ids, reward_of in zip(completions[G:], (1.0, 0.0), strict=True):
            gap = logps(tiny_model(), prompt, ids) - logps(member, prompt, ids)
            is_left_out = reward_of < rewards.mean() and gap.mean() < 0
            weights.append(torch.zeros_like(gap) if is_left_out else gap.exp())
    assert bool((weights[-1] == 0).all())  # the wrong one is filtered: the policy likes it less than its writer
    assert_same(found, by_hand(prompt, completions, rewards - rewards.mean(), weights))
    assert trainer.state.log_history[0]["ensemble/peer/used"] == 0.5


def test_a_baseline_moves_the_mean_and_has_no_gradient(tmp_path):
    reward = Recorder(lambda call, i: (0.0, 1.0, 0.0, 1.0, 1.0)[i])
    found, trainer, prompt, _ = step(tmp_path, reward, "baseline")
    (completions,) = reward.calls
    advantages = torch.tensor([0.0, 1.0, 0.0]) - 3 / 5  # the mean of all five
    assert_same(found, by_hand(prompt, completions[:G], advantages))
    assert trainer.state.log_history[0]["ensemble/peer/win_rate"] == pytest.approx((2 + 0.5) / 3)


def test_a_right_rescue_joins_a_group_in_which_the_policy_failed_with_weight_1(tmp_path):
    reward = Recorder(lambda call, i: 0.0 if call == 0 else (1.0, 0.0)[i])
    found, trainer, prompt, _ = step(tmp_path, reward, "rescue")
    own, rescues = reward.calls
    assert (len(own), len(rescues)) == (G, K)
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])  # the wrong rescue stays out
    assert_same(found, by_hand(prompt, [*own, rescues[0]], rewards - rewards.mean()))
    logs = trainer.state.log_history[0]
    assert (logs["ensemble/peer/asked"], logs["ensemble/peer/used"], logs["ensemble/peer/share"]) == (1.0, 0.5, 1.0)
    assert logs["reward"] == 0.0  # the policy's own


def test_a_rescue_is_not_asked_where_the_policy_succeeded_once(tmp_path):
    reward = Recorder(lambda call, i: float(i == 0))
    found, trainer, prompt, _ = step(tmp_path, reward, "rescue")
    (own,) = reward.calls
    rewards = torch.tensor([1.0, 0.0, 0.0])
    assert_same(found, by_hand(prompt, own, rewards - rewards.mean()))
    assert trainer.state.log_history[0]["ensemble/peer/asked"] == 0.0


def test_weights_by_hand():
    """mu = (0.5, 0.25), pi = (0.25, 0.5): ratios 0.5 and 2; drift = mean(log 2, -log 2) = 0."""
    mu, pi = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    mask, bad = torch.tensor([[True, True]]), torch.tensor([[-1.0]])
    assert alg.MemberWeight(high=1.5)(pi, mu, mask, bad).tolist() == [[pytest.approx(0.5), 1.5]]
    far = torch.tensor([[0.25, 0.25]]).log() - 1  # drift: mean(1 + log 2, 1) = 1.35 nats
    assert alg.MemberWeight(drift=1.3)(far, mu, mask, bad).tolist() == [[0.0, 0.0]]
    assert alg.MemberWeight(drift=1.4)(far, mu, mask, bad)[0, 1] == pytest.approx(math.exp(-1))
    assert alg.MemberWeight(drift=1.3)(far, mu, mask, -bad)[0, 1] == pytest.approx(math.exp(-1))  # a right answer stays
    one = torch.tensor([[True, False]])
    assert alg.MemberWeight()(pi, mu, one, bad)[0, 1] == 0.0
