"""Experts of the sampler in the learner (R3), the load-balancing loss over shared prompts, and what routers report."""

from __future__ import annotations

import copy
import json
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from shared_rows import ROWS, assert_same, checkpointing, gradients

from covey import GRPOConfig, GRPOTrainer
from covey.config.checks import processor_has_bfloat16
from covey.doctor.why import recorded
from covey.errors import ConfigError, Unsupported
from covey.kernels import find_routers
from covey.learner.expert_choices import expect_replay
from covey.learner.packing import Row, unscored_row
from covey.learner.policy import Policy
from covey.learner.preparation import checkpoint_activations
from covey.rollout import NativeSampler, SamplingParams, worker_process
from covey.runs import serialization
from covey.training.build_learner import auxiliary_coefficient
from covey.types import Group, Prompt
from expert_models import DENSE, FAMILIES, expert_model, with_adapted_experts
from forked import worker_of
from kit import rest_nightly, tiny_tokenizer

PROMPTS = [Prompt(uid=str(i), token_ids=tuple(range(5 + i, 6 + 6 * i))) for i in range(1, 4)]
PROMPTS = [Prompt(uid="0", token_ids=(7,)), *PROMPTS]  # of one token: nothing is prefilled


def drawn(model: Any, tokens: int = 16, **options: Any) -> list[Group]:
    sampler = NativeSampler(model, tiny_tokenizer(), **{"records_experts": True, **options})
    return list(sampler.sample(PROMPTS, 4, SamplingParams(max_tokens=tokens, seed=0)))


def rows_in(groups: list[Group]) -> list[Row]:
    return [unscored_row(group.prompt, one, i) for i, group in enumerate(groups) for one in group.completions]


@torch.no_grad()
def gaps(policy: Policy, groups: list[Group]) -> tuple[torch.Tensor, float]:
    """Differences of sampler and learner, of each token; and the share of changed choices, if it is measured."""
    measured = policy.measure(rows_in(groups))
    rows = zip(measured.logp, (one for group in groups for one in group.completions), strict=True)
    apart = [(row[: one.num_tokens] - one.logprobs).abs() for row, one in rows if one.logprobs is not None]
    return torch.cat(apart), float(measured.routing.get("experts/changed", torch.tensor(torch.nan)))


@pytest.mark.parametrize(
    "family, is_packed",
    rest_nightly([*product(FAMILIES, (True, False))], {("Qwen3Moe", True), ("GptOss", False)}),
)
def test_the_sampler_records_the_experts_that_the_learner_would_choose(family, is_packed):
    model = expert_model(family)
    groups = drawn(model)
    policy = Policy(model, pad_id=0, replays_experts=True)
    policy._is_shared = None if is_packed else False
    apart, changed = gaps(policy, groups)
    assert changed == 0.0, "in float32 both choose the same"
    assert apart.max() < 1e-5
    for group in groups:
        for one in group.completions:
            assert one.experts is not None
            assert one.prompt_experts is not None
            assert one.experts.dtype == torch.uint8
            assert one.experts.shape[:1] == one.token_ids.shape
            assert one.prompt_experts is group.completions[0].prompt_experts, "completions share the prompt's"
            assert one.prompt_experts.shape == (len(group.prompt.token_ids) - 1, *one.experts.shape[1:])


def other_experts(groups: list[Group]) -> list[Group]:
    """The groups with all experts moved on by 3 of 8."""
    from dataclasses import replace

    moved = lambda x: (x + 3) % 8
    change = lambda one: replace(one, experts=moved(one.experts), prompt_experts=moved(one.prompt_experts))
    return [replace(group, completions=tuple(map(change, group.completions))) for group in groups]


@pytest.mark.parametrize("family", rest_nightly(FAMILIES, ("Qwen3Moe",)))
def test_replayed_experts_are_taken_forward_and_backward_and_when_activations_are_computed_again(family):
    """Other experts than the router's: packed and padded rows, and recomputed activations, agree in value and gradient."""
    model = expert_model(family)
    rows = rows_in(other_experts(drawn(model, 6)))
    own, _ = gradients(Policy(model, pad_id=0), [rows])
    apart = gradients(Policy(model, pad_id=0, replays_experts=True), [[row] for row in rows])
    assert max(float((a - b).abs().max()) for a, b in zip(own, apart[0], strict=True)) > 0.05
    assert_same(gradients(Policy(model, pad_id=0, replays_experts=True), [rows]), apart)
    again = Policy(checkpointing(model), pad_id=0, replays_experts=True)
    values, found = gradients(again, [rows])
    again.release()
    assert_same((values, found), apart)
    assert not any("forward" in vars(router) for router in again.routing.find(again)[0].modules), (
        "nothing stays patched"
    )


@pytest.mark.skipif(not processor_has_bfloat16(), reason="in emulated bfloat16 sampler and learner round alike")
def test_replay_closes_the_gap_that_other_experts_leave_in_bfloat16():
    """Rounding changes the experts of some tokens, whose log-probabilities move most. `docs/experts.md` has the numbers."""
    sizes = {"num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 1}
    model = expert_model("Qwen3Moe", torch.bfloat16, **sizes)
    groups = drawn(model, 48)
    without, _ = gaps(Policy(model, pad_id=0), groups)
    replayed, changed = gaps(Policy(model, pad_id=0, replays_experts=True), groups)
    assert 0.0 < changed < 0.05
    assert replayed.mean() < 0.6 * without.mean()
    assert replayed.max() < 0.5 * without.max()


@pytest.mark.parametrize("dtype", rest_nightly(["float32", "bfloat16"], ["bfloat16"]))
def test_experts_are_recorded_with_an_adapter_and_in_another_precision(dtype):
    adapted = with_adapted_experts(expert_model("Qwen3Moe"))
    apart, changed = gaps(Policy(adapted, pad_id=0, replays_experts=True), drawn(adapted, dtype=dtype))
    assert apart.mean() < (1e-5 if dtype == "float32" else 0.02)
    assert changed < 0.1


def test_steps_on_static_buffers_record_the_same_experts():
    model = expert_model("Qwen3Moe")
    static = NativeSampler(model, tiny_tokenizer(), records_experts=True, dtype="float32", max_rows=8)
    static.is_static, static.kernels = True, None
    params = SamplingParams(max_tokens=12, seed=0)
    by_uid = lambda groups: {group.prompt.uid: group for group in groups}
    mine = by_uid(static.sample(PROMPTS, 4, params))
    for uid, group in by_uid(drawn(model, 12, dtype="float32")).items():
        for one, other in zip(group.completions, mine[uid].completions, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert torch.equal(one.experts, other.experts)
            assert torch.equal(one.prompt_experts, other.prompt_experts)


@pytest.mark.parametrize("family, options", DENSE.values(), ids=list(DENSE))
def test_a_model_without_experts_is_refused_by_its_class(family, options):
    model = expert_model(family, **options)
    with pytest.raises(ConfigError, match=f"{family}ForCausalLM has no experts"):
        expect_replay(Policy(model, pad_id=0))
    with pytest.raises(Unsupported, match="no experts"):
        NativeSampler(model, tiny_tokenizer(), records_experts=True)


def test_a_router_that_weighs_experts_of_hidden_groups_with_nothing_is_refused():
    """A replayed expert of such a group would get no weight."""

    class Hiding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.experts = torch.nn.Embedding(32, 8), torch.nn.Parameter(torch.randn(8, 8, 8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(ids)
            scores = (hidden @ self.experts[0]).softmax(-1)
            scores = scores.masked_fill(torch.arange(8) < 4, 0.0)
            weights, chosen = scores.topk(2, dim=-1)
            return (self.experts[chosen] @ hidden[..., None, :, None] * weights[..., None, None]).sum(-3)

    model = Hiding()
    with pytest.raises(Unsupported, match="hide groups of experts"):
        find_routers(model, model)


# -- the load-balancing loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "GraniteMoe"])
def test_the_balancing_loss_over_shared_prompts_is_transformers_over_the_rows(family):
    """Value and gradient, with each prompt once: padding left out, the last token of each row in."""
    model = expert_model(family)
    policy = Policy(model, pad_id=0, auxiliary_coefficient=1.0)
    width = max(row.num_tokens for row in ROWS)
    ids, mask = torch.zeros(len(ROWS), width, dtype=torch.long), torch.zeros(len(ROWS), width, dtype=torch.long)
    for i, row in enumerate(ROWS):
        whole = [*row.prompt.token_ids, *row.completion.token_ids.tolist()]
        ids[i, : len(whole)], mask[i, : len(whole)] = torch.tensor(whole), 1
    expected = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert policy.shares_prompts()
    measured = policy.measure(ROWS)
    assert measured.balance is not None
    torch.testing.assert_close(measured.balance.loss(), expected, rtol=1e-5, atol=1e-6)
    measured.balance.loss().backward()
    for name, gradient in wanted.items():
        got = dict(model.named_parameters())[name].grad
        assert (got - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name
    policy.release()


@pytest.mark.parametrize("family, options", DENSE.values(), ids=list(DENSE))
def test_a_weight_of_the_balancing_loss_is_refused_for_a_dense_variant(family, options):
    arguments = SimpleNamespace(router_aux_loss_coef=0.1)
    with pytest.raises(ConfigError, match=f"{family}ForCausalLM computes no load-balancing loss; leave it out"):
        auxiliary_coefficient(arguments, expert_model(family, **options))
    arguments.router_aux_loss_coef = None
    assert auxiliary_coefficient(arguments, expert_model(family, **options)) == 0.0


def test_a_model_that_declares_a_coefficient_and_computes_no_balancing_loss_has_none():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    config = transformers.Llama4TextConfig(
        vocab_size=64, num_attention_heads=2, num_local_experts=2, pad_token_id=0, **sizes
    )
    model = transformers.Llama4ForCausalLM(config)
    assert config.router_aux_loss_coef > 0
    assert auxiliary_coefficient(SimpleNamespace(router_aux_loss_coef=None), model) == 0.0
    with pytest.raises(ConfigError, match="Llama4ForCausalLM computes no load-balancing loss; leave it out"):
        auxiliary_coefficient(SimpleNamespace(router_aux_loss_coef=0.1), model)


def test_reentrant_checkpoints_which_take_the_gradient_from_the_balancing_loss_are_refused():
    model, reentrant = expert_model("Qwen3Moe"), {"use_reentrant": True}
    options = {"checkpoints_activations": True, "gradient_checkpointing_kwargs": reentrant}
    with pytest.raises(
        ConfigError, match="would take the gradient from the load-balancing loss .* router_aux_loss_coef=0"
    ):
        auxiliary_coefficient(SimpleNamespace(router_aux_loss_coef=None, **options), model)
    assert auxiliary_coefficient(SimpleNamespace(router_aux_loss_coef=0.0, **options), model) == 0.0
    checkpoint_activations(model.train(), reentrant)
    balance = Policy(model, pad_id=0, auxiliary_coefficient=1.0).measure(ROWS).balance
    assert balance is not None
    assert not balance.probability.requires_grad, "PyTorch leaves it without one: else it need not be refused"


def test_log_probabilities_do_not_depend_on_the_balancing_loss():
    model = expert_model("Qwen3Moe")
    plain, balanced = (gradients(Policy(model, pad_id=0, auxiliary_coefficient=c), [ROWS]) for c in (0.0, 1.0))
    assert_same(balanced, plain)


# -- a run ------------------------------------------------------------------------------------------------------------


def trainer(place: Any, eval_dataset: Any = None, **options: Any) -> GRPOTrainer:
    tokenizer = tiny_tokenizer()
    arguments: dict[str, Any] = {
        **{"output_dir": str(place), "max_steps": 2, "learning_rate": 1e-2, "beta": 0.0, "bf16": False},
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "save_strategy": "no"},
        **options,
    }
    return GRPOTrainer(
        model=expert_model("Qwen3Moe", vocab_size=len(tokenizer)),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": ["Tom has 3 apples", "What is 12"]}),
        eval_dataset=eval_dataset,
    )


def test_a_run_replays_and_reports_the_routers(tmp_path):
    run = trainer(
        tmp_path, router_replay="R3", logging_steps=1, save_strategy="steps", save_steps=1, rollout_log_steps=1
    )
    run.train()
    logged = [entry for entry in run.state.log_history if "experts/changed" in entry]
    with pytest.raises(ConfigError, match="sampler's experts, which rollouts do not record"):
        recorded.load(tmp_path, 2)
    assert logged
    assert all(entry["experts/changed"] == 0.0 and entry["experts/entropy"] > 0.3 for entry in logged)
    assert all(0.25 <= entry["experts/max_load"] <= 1.0 and entry["aux_loss"] > 0 for entry in logged)


def test_the_logged_balance_loss_is_a_mean_over_steps_and_over_batches_of_an_evaluation(tmp_path):
    batches = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    run = trainer(tmp_path, logging_steps=2, eval_dataset=Dataset.from_dict({"prompt": ["Tom has", "12 +"]}), **batches)
    run.train()
    each = [json.loads(line)["aux_loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [entry["aux_loss"] for entry in run.state.log_history if "aux_loss" in entry and "loss" in entry]
    (evaluated,) = [entry["eval_aux_loss"] for entry in run.state.log_history if "eval_aux_loss" in entry]
    assert logged == pytest.approx(sum(each) / 2)
    assert evaluated == pytest.approx(logged, rel=0.4)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"rollout_backend": "transformers"}, "Covey's own engine and vLLM record and transformers does not"),
        ({"generation_kwargs": {"num_beams": 2}}, "transformers' generate does not"),
        ({"router_replay": "R2"}, "R3"),
    ],
)
def test_what_cannot_replay_is_refused(tmp_path, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        trainer(tmp_path, **{"router_replay": "R3", **options}).train()


def test_experts_stay_with_the_groups_of_a_checkpoint(tmp_path):
    groups = drawn(expert_model("Qwen3Moe"), 4)
    serialization.write({"groups": groups}, tmp_path / "state")
    for group, again in zip(groups, serialization.read(tmp_path / "state")["groups"], strict=True):
        for one, other in zip(group.completions, again.completions, strict=True):
            assert one.experts is not None
            assert one.prompt_experts is not None
            assert torch.equal(one.experts, other.experts)
            assert other.prompt_experts is again.completions[0].prompt_experts, "stored once"
            assert torch.equal(one.prompt_experts, other.prompt_experts)


def test_tokens_of_an_environment_have_their_experts_too():
    model = expert_model("Qwen3Moe")
    environment = lambda turns: [[9, 10, 11] if len(turn.token_ids) < 8 else None for turn in turns]
    groups = drawn(model, 24, environment=environment, eos_ids=list(range(2, 40)))
    assert any(one.mask is not None and not bool(one.mask.all()) for group in groups for one in group.completions)
    policy = Policy(model, pad_id=0, replays_experts=True)
    assert float(policy.measure(rows_in(groups)).routing["experts/changed"]) == 0.0


@pytest.mark.slow
def test_a_run_ahead_replays_the_experts_of_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "_start", worker_of("covey.rollout.worker"))
    run = trainer(tmp_path, router_replay="R3", logging_steps=1, async_rollouts=True)
    run.train()
    assert any("experts/changed" in entry for entry in run.state.log_history)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
def test_a_router_written_in_float32_is_computed_so_under_autocast(weights):
    """DeepSeek V3's: rounded to 16 bits, saturated scores of experts tie."""
    model, seen = expert_model("DeepseekV3", weights), []
    router = next(module for module in model.modules() if type(module).__name__.endswith("Router"))
    router.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="bfloat16" if weights == torch.float32 else "auto")
    with torch.no_grad(), policy.autocast():
        copy.deepcopy(model)(input_ids=torch.tensor([[5, 6, 7]]))
        assert torch.is_autocast_enabled("cpu")
        assert model.lm_head(torch.ones(1, 32)).dtype == torch.bfloat16
    list(sampler.sample(PROMPTS, 1, SamplingParams(max_tokens=2, seed=0)))
    assert len(seen) > 3
    for states, logits in seen:
        assert torch.equal(logits, torch.nn.functional.linear(states.float().flatten(0, -2), router.weight.float()))


def test_autocast_goes_on_behind_a_router_that_fails():
    model = expert_model("DeepseekV3", torch.bfloat16)
    router = next(module for module in model.modules() if type(module).__name__.endswith("Router"))
    with Policy(model, pad_id=0).autocast():
        with pytest.raises(RuntimeError):
            router(torch.ones(2, 3))
        assert torch.is_autocast_enabled("cpu")
