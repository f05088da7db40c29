"""ECHO: the mean negative log-likelihood of what tools and environments answered, beside the policy gradient."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.errors import ConfigError
from covey.learner import Policy
from covey.types import Completion, Group, TokenBatch, Totals
from environments.acting import chat_tokenizer
from environments.tool_runs import add, calling
from kit import learner_of, prompt, tiny_model, tiny_tokenizer

OBSERVED = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0]], dtype=torch.bool)
LOGP = torch.tensor([[-0.5, -1.0, -2.0, -0.25, -0.3, -1.5], [-0.7, -0.125, -0.2, -3.0, -0.4, 0.0]], dtype=torch.float64)
PRIME = 0.1375
"""Of prime-rl's `compute_loss` on these numbers: `ce_weights` of 0.1 at the observed tokens, `ce_scale` 5, nothing else."""


def test_the_term_is_that_of_prime_rl_in_any_split_and_dilutes_no_policy_gradient():
    logp = LOGP.clone().requires_grad_()
    tokens = TokenBatch(
        logp=logp,
        old_logp=LOGP,
        advantages=torch.zeros(2, 1, dtype=torch.float64),
        mask=~OBSERVED & (LOGP < 0),
        group=torch.tensor([0, 0]),
        observed=OBSERVED,
        observed_logp=torch.where(OBSERVED, logp, 0.0),
    )
    algorithm = alg.dapo().replace(regularizers=alg.Echo())
    totals = Totals.of(tokens.mask, tokens.group, 6, OBSERVED)
    assert algorithm.loss(tokens, totals).item() == pytest.approx(PRIME, abs=1e-12)
    halves = [algorithm.loss(tokens.rows(i, i + 1), totals) for i in range(2)]
    gradient = torch.autograd.grad(sum(halves), logp)[0]
    torch.testing.assert_close(gradient, -0.1 * OBSERVED.double() / 5, rtol=0, atol=1e-15)
    measured = algorithm.metrics(tokens, totals)
    assert measured["echo/loss"].value == pytest.approx(10 * PRIME)


def groups_of(tokenizer):
    """Two prompts; an episode with an answer in the middle, one that is cut, one without a tool."""
    ids = torch.arange(40, 47)
    mask = torch.tensor([True, True, False, False, False, True, True])
    first = Completion(token_ids=ids, text="", finish="stop", mask=mask)
    cut = Completion(token_ids=ids.flip(0), text="", finish="length", mask=mask)
    plain = Completion(token_ids=ids[:3], text="", finish="stop")
    shared = {"advantages": torch.zeros(2)}
    return [
        Group(prompt=prompt("2 + 2 =", uid="0:0", tokenizer=tokenizer), completions=(first, cut), **shared),
        Group(prompt=prompt("12 + 30", uid="0:1", tokenizer=tokenizer), completions=(plain, first), **shared),
    ]


@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("masks", [False, True])
def test_a_step_has_the_gradient_of_the_answers_alone(max_rows, masks):
    model, groups = tiny_model("qwen2", dtype=torch.float64), groups_of(tiny_tokenizer())
    rows = [(group.prompt, done) for group in groups for done in group.completions if done.mask is not None]
    rows = [(shown, done) for shown, done in rows if not (masks and done.is_truncated)]
    losses = []
    for shown, done in rows:
        ids = torch.tensor([[*shown.token_ids, *done.token_ids.tolist()]])
        logp = torch.log_softmax(model(ids).logits[0, len(shown.token_ids) - 1 : -1], -1)
        losses.append(-logp.gather(-1, done.token_ids[:, None]).squeeze(-1)[~done.mask])
    expected = torch.cat(losses).mean()
    gradients = torch.autograd.grad(0.5 * expected, list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    policy = Policy(model, pad_id=0)
    learner = learner_of(
        policy,
        torch.optim.SGD(policy.parameters(), lr=1.0),
        max_completion_length=8,
        max_rows=max_rows,
        max_grad_norm=0.0,
        mask_truncated=masks,
    )
    report = learner.step(groups, alg.dapo().replace(regularizers=alg.Echo(0.5)), 1)
    for old, new, gradient in zip(before, model.parameters(), gradients, strict=True):
        assert (old - new.detach() - gradient).abs().max() <= 1e-6 * gradient.abs().max()
    assert report["echo/loss"] == pytest.approx(expected.item(), rel=1e-9)


def test_what_an_environment_wrote_is_read_from_the_mask_and_a_prompts_end_is_not():
    done = Completion(
        token_ids=torch.arange(5), text="", finish="stop", mask=torch.tensor([False, True, False, False, True])
    )
    assert done.observed.tolist() == [False, False, True, True, False]
    assert not Completion(token_ids=torch.arange(2), text="", finish="stop").observed.any()


def tool_run(folder, **given):
    args = GRPOConfig(
        str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=256,
        max_steps=6,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        algorithm="grpo, regularizer=Echo(weight=1.0)",
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}]}] * 4)
    reward = lambda completions, **columns: [0.0] * len(completions)
    return GRPOTrainer(calling(), reward, args, data, processing_class=chat_tokenizer(), **given)


@pytest.mark.slow
def test_a_run_with_a_tool_learns_to_predict_its_answers_without_any_reward(tmp_path):
    trainer = tool_run(tmp_path, tools=[add])
    trainer.train()
    losses = [line["echo/loss"] for line in trainer.state.log_history if "echo/loss" in line]
    assert len(losses) == 6
    assert sum(losses[3:]) < 0.8 * sum(losses[:3]), losses


def test_a_run_without_anything_that_answers_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="this run has none"):
        tool_run(tmp_path)


@pytest.mark.parametrize("weight", [0.0, -1.0, True, "1", float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ConfigError, match="weight"):
        alg.Echo(weight)
