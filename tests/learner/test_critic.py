"""The critic of PPO, as a head on the policy or as a model of its own: exact values, training, no pull on the policy, resume."""

import math
from collections import deque
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.errors import ConfigError
from covey.learner import Policy, ValueHead, ValueModel
from covey.learner.optimizer import make_optimizer
from covey.learner.packing import rows_of
from covey.learner.preparation import prepare_for_training
from covey.learner.update_guard import GuardPolicy, UpdateGuard
from covey.types import Completion, Group, Prompt
from kit import learner_of, rest_nightly, tiny_model, tiny_tokenizer

KINDS = ("head", "separate")


def group(number, prompt, lengths, advantages):
    draw = torch.Generator().manual_seed(number)
    longest = max(lengths)
    return Group(
        prompt=Prompt(uid=f"0:{number}", token_ids=tuple(prompt)),
        completions=tuple(
            Completion(token_ids=torch.randint(3, 200, (n,), generator=draw), text="", finish="stop") for n in lengths
        ),
        advantages=torch.tensor(advantages)[:, None].expand(-1, longest),
        returns=torch.tensor(advantages)[:, None].expand(-1, longest) + 1.0,
    )


GROUPS = [group(0, [5, 6, 7], [4, 2, 7], [1.0, -0.5, -0.6]), group(1, [8, 9, 10, 11], [3, 5], [0.7, -0.7])]


def critic_of(kind, policy):
    return ValueModel.of(policy) if kind == "separate" else ValueHead(32, policy.device)


def learner(kind=None, rate=1.0, make=torch.optim.SGD, **changed):
    policy = Policy(tiny_model("qwen2", layers=2), pad_id=0)
    critic = {} if kind is None else {"critic": critic_of(kind, policy)}
    parameters = [*policy.parameters(), *(critic["critic"].parameters() if critic else [])]
    optimizer = make(parameters, lr=rate)
    return learner_of(policy, optimizer, **{"max_completion_length": 8, **critic, **changed})


def test_a_completion_that_nobody_scored_teaches_the_critic_nothing():
    def weights(groups):
        one = learner("head", rate=0.5)
        report = one.step(groups, alg.ppo(kl=None), 1)
        return one.critic.linear.weight.detach().clone(), report

    unscored = replace(GROUPS[0], advantages=GROUPS[0].advantages.clone(), returns=GROUPS[0].returns.clone())
    unscored.advantages[1], unscored.returns[1] = 0.0, torch.nan
    at_value = replace(
        unscored, returns=unscored.returns.nan_to_num(0.0)
    )  # the head's values start at 0: no error there
    (without, report), (plain, _) = weights([unscored, GROUPS[1]]), weights([at_value, GROUPS[1]])
    assert torch.equal(without, plain)
    assert report["value_loss"] == report["value_loss"]
    assert report["value/clip_ratio"] == 0.0
    assert not torch.equal(without, weights(GROUPS)[0])


def test_a_separate_critics_values_are_a_plain_forward_of_its_own_decoder():
    policy = Policy(tiny_model("qwen2", layers=2).eval(), pad_id=0)
    critic = ValueModel.of(policy)
    torch.nn.init.normal_(critic.linear.weight)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)  # the policy goes its own way, the copy stays
    rows = rows_of(GROUPS)
    values = critic.values(policy.measure(rows), rows)
    assert values.shape == (5, 7)
    start = tiny_model("qwen2", layers=2).get_decoder()
    for row, own in zip(rows, values, strict=True):
        ids = torch.cat([torch.tensor(row.prompt.token_ids), row.completion.token_ids])[None]
        hidden = start(input_ids=ids).last_hidden_state[0, len(row.prompt.token_ids) - 1 : -1]
        torch.testing.assert_close(own[: len(hidden)], critic.linear(hidden)[:, 0], rtol=1e-5, atol=1e-5)
        assert not own[len(hidden) :].any()


@pytest.mark.parametrize("kind", rest_nightly(KINDS, 1))
def test_values_start_at_zero_and_move_towards_the_returns(kind):
    one = learner(kind, rate=1e-2, make=torch.optim.AdamW)
    algorithm = alg.ppo(kl=None, critic_model=kind)
    losses = []
    for step in range(12):
        groups = one.annotate(GROUPS, algorithm)
        assert step or not any(completion.values.any() for one_group in groups for completion in one_group.completions)
        losses.append(one.step(groups, algorithm, step + 1)["value_loss"])
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_grad_norm", rest_nightly([0.0, 1e-3], [1e-3]), ids=["unclipped", "clipped"])
def test_the_value_loss_never_touches_the_policys_step(kind, max_grad_norm):
    algorithm = alg.ppo(kl=None, critic_model=kind, value_coefficient=100.0)
    without, with_critic = learner(max_grad_norm=max_grad_norm), learner(kind, max_grad_norm=max_grad_norm)
    groups = with_critic.annotate(GROUPS, algorithm)
    report = with_critic.step(groups, algorithm, 1)
    plain = without.step(groups, algorithm.replace(critic=None), 1)
    assert report["value_grad_norm"] > 10 * report["grad_norm"]
    assert report["grad_norm"] == plain["grad_norm"]
    for a, b in zip(with_critic.policy.parameters(), without.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_gradient_checkpointing_of_the_policy_is_the_critics_too_and_changes_no_gradient(tmp_path):
    gradients = []
    for is_checkpointed in (False, True):
        model = tiny_model("qwen2", layers=2)
        if is_checkpointed:
            prepare_for_training(model, GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False))
        policy = Policy(model.train(), pad_id=0)
        critic = ValueModel.of(policy)
        torch.nn.init.ones_(critic.linear.weight)
        assert critic.decoder.layers[0].gradient_checkpointing is is_checkpointed
        rows = rows_of(GROUPS)
        critic.values(policy.measure(rows), rows).square().sum().backward()
        assert critic.decoder.training
        gradients.append(torch.cat([p.grad.flatten() for p in critic.parameters()]))
        assert all(p.grad is None for p in policy.parameters())
    assert (gradients[1] - gradients[0]).norm() < 1e-6 * gradients[0].norm()


def test_with_adapters_the_critic_is_the_whole_base_decoder_and_all_of_it_is_trained():
    base = tiny_model("qwen2")
    start = [p.clone() for p in base.get_decoder().parameters()]
    policy = Policy(get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=2)), pad_id=0)
    names = [name for name, _ in policy.model.named_parameters()]
    critic = ValueModel.of(policy)
    assert [name for name, _ in policy.model.named_parameters()] == names
    assert not any("lora" in name for name in critic.state_dict())
    assert all(p.requires_grad for p in critic.parameters())
    for mine, theirs in zip(critic.decoder.parameters(), start, strict=True):
        assert torch.equal(mine, theirs)


def test_weight_decay_leaves_out_the_critics_biases_and_norms(tmp_path):
    policy = Policy(tiny_model("qwen2"), pad_id=0)
    critic = ValueModel.of(policy)
    args = GRPOConfig(output_dir=str(tmp_path), weight_decay=0.1, report_to="none", use_cpu=True, bf16=False)
    decayed, kept = make_optimizer(args, policy.model, [critic]).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    holds = lambda one, parameter: any(parameter is other for other in one["params"])
    for name, parameter in critic.named_parameters():
        is_plain = "norm" in name or "bias" in name
        assert (holds(kept, parameter), holds(decayed, parameter)) == (is_plain, not is_plain), name
    assert len(decayed["params"]) + len(kept["params"]) == len(policy.parameters()) + len(critic.parameters())


def test_the_kind_is_named_in_a_string_and_a_wrong_one_is_refused():
    assert alg.from_name("ppo, critic_model=separate").critic.model == "separate"
    assert alg.ppo().critic.model == "head"
    with pytest.raises(ConfigError, match="Did you mean separate"):
        alg.from_name("ppo, critic_model=seperate")


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer(folder, kind):
    return GRPOTrainer(
        model=tiny_model(hidden=16),
        processing_class=tiny_tokenizer(),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has", "12 + 30", "What is"]}),
        args=GRPOConfig(
            output_dir=str(folder),
            algorithm=f"ppo, critic_model={kind}",
            max_steps=4,
            save_strategy="steps",
            save_steps=3,
            per_device_train_batch_size=4,
            num_generations=4,
            num_iterations=2,
            max_completion_length=6,
            learning_rate=1e-2,
            weight_decay=0.1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
    )


def everything(one):
    """Every weight of policy and critic."""
    critic = one._parts.learner.critic.state_dict()
    return {**{f"policy.{name}": value for name, value in one.model.state_dict().items()}, **critic}


@pytest.mark.parametrize("kind", rest_nightly(KINDS, 1))
def test_a_run_with_a_critic_resumes_bit_for_bit(kind, tmp_path):
    whole = trainer(tmp_path / "whole", kind)
    whole.train()
    again = trainer(tmp_path / "again", kind)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    expected, found = everything(whole), everything(again)
    assert len(expected) == len(found)
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    assert expected["linear.weight"].any()
    assert replace(alg.ppo().critic, model=kind) == whole.algorithm.critic


def test_a_spike_of_the_policys_gradient_clips_the_policys_step_alone():
    def critics_weights(usual):
        one = learner("head", max_grad_norm=0.0, guard=UpdateGuard(GuardPolicy(on_spike="clip")))
        one.guard.seen = {"grad_norm": deque([math.log(usual)] * 30)}
        report = one.step(GROUPS, alg.ppo(kl=None), 1)
        return [event.kind for event in report.events], one.critic.linear.weight.detach().clone()

    (spiked, clipped), (calm, free) = critics_weights(1e-9), critics_weights(1e9)
    assert (spiked, calm) == (["spike"], [])
    assert torch.equal(clipped, free)
