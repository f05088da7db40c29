"""One optimizer step: the same gradient whatever the split, nothing from what does not count, nothing at all from bad numbers."""

from dataclasses import replace

import pytest
import torch

from covey import algorithms as alg
from covey.errors import SpoiledError
from covey.learner import FrozenCopy, Policy
from covey.learner.packing import can_have_gradient, rows_of
from covey.types import Completion, Group, Prompt, TokenBatch
from kit import learner_of, rest_nightly, tiny_model


def group(number, prompt, lengths, advantages, finish="stop"):
    completions = tuple(
        Completion(
            token_ids=torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(10 * number + i)),
            text="",
            finish=finish,
        )
        for i, n in enumerate(lengths)
    )
    return Group(
        prompt=Prompt(uid=f"0:{number}", token_ids=tuple(prompt)),
        completions=completions,
        rewards=torch.zeros(len(lengths), 1),
        advantages=torch.tensor(advantages),
    )


GROUPS = [
    group(0, [5, 6, 7], [4, 2, 7], [1.0, -0.5, -0.5]),
    group(1, [8, 9], [3, 5, 1], [0.0, 0.0, 0.0]),
    group(2, [4, 4, 4, 4], [6, 2, 2], [-1.0, 0.4, 0.6]),
]


def learner(model=None, **changed):
    model = model or tiny_model("qwen2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {
        "policy": Policy(model, pad_id=0),
        "optimizer": optimizer,
        "max_completion_length": 8,
        "max_grad_norm": 0.0,
    }
    return learner_of(**{**given, **changed})


def moved(one, algorithm, groups=GROUPS):
    """How far one step of plain gradient descent at rate 1 moves the weights: minus the gradient."""
    before = [p.detach().clone() for p in one.policy.parameters()]
    report = one.step(groups, algorithm, 1)
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(one.policy.parameters(), before, strict=True)]), report


@pytest.mark.parametrize(
    "name, max_rows, max_tokens",
    rest_nightly(
        [
            (name, *sizes)
            for sizes in ((1, None), (2, None), (4, 20))
            for name in ("dapo", "gspo", "gmpo", "bnpo", "dr_grpo", "cispo", "gpg")
        ],
        [("dapo", 1, None), ("gspo", 2, None), ("gmpo", 4, 20), ("dapo", 4, 20)],
    ),
)
def test_micro_batches_change_no_gradient(name, max_rows, max_tokens):
    algorithm = alg.from_name(name).replace(kl=None)
    whole, whole_report = moved(learner(max_rows=99), algorithm)
    parts, parts_report = moved(learner(max_rows=max_rows, max_tokens=max_tokens), algorithm)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    for metric in ("loss", "entropy", "grad_norm"):
        assert parts_report[metric] == pytest.approx(whole_report[metric], rel=1e-4, abs=1e-6)


def test_a_part_that_looks_at_the_whole_step_sees_it_whatever_the_split():
    algorithm = alg.dapo().replace(weights=(alg.TopEntropy(0.3),))

    def decided():
        """A model whose entropies differ by more than rounding."""
        model = tiny_model("qwen2")
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(8)
        return model

    whole, _ = moved(learner(decided(), max_rows=99), algorithm)
    parts, _ = moved(learner(decided(), max_rows=1), algorithm)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bit", [0.0, 1e-6, -1e-6])
def test_entropies_that_differ_by_rounding_are_in_or_out_together(bit):
    entropy = torch.tensor([[3.0, 2.0, 2.0 + bit, 1.0]])
    tokens = TokenBatch(
        logp=-entropy, old_logp=-entropy, advantages=torch.ones(1, 1), mask=torch.ones(1, 4, dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.int64), entropy=entropy,
    )  # fmt: skip
    assert alg.TopEntropy(2 / 3).prepare(tokens, None)(tokens).tolist() == [[1.0, 1.0, 1.0, 0.0]]
    assert alg.TopEntropy(1 / 3).prepare(tokens, None)(tokens).tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_a_dead_group_costs_no_backward_and_changes_no_gradient():
    algorithm = alg.dapo()
    rows = rows_of(GROUPS)
    assert [can_have_gradient(row, algorithm) for row in rows] == [True] * 3 + [False] * 3 + [True] * 3
    skipping, report = moved(learner(), algorithm)
    blunt = algorithm.replace(objective=lambda tokens: algorithm.objective(tokens))  # says nothing of how it scales
    assert all(can_have_gradient(row, blunt) for row in rows)
    everything, blunt_report = moved(learner(), blunt)
    torch.testing.assert_close(skipping, everything, rtol=1e-4, atol=1e-7)
    assert report["entropy"] == pytest.approx(blunt_report["entropy"]), "its numbers are still shown"


def test_a_dead_group_is_trained_on_when_another_term_needs_it():
    rows = rows_of(GROUPS)
    for algorithm in (
        alg.grpo(kl=alg.KL(coefficient=0.1)),
        alg.grpo().replace(regularizers=(alg.entropy_bonus(0.01),)),
    ):
        assert all(can_have_gradient(row, algorithm) for row in rows)


def test_truncated_completions_can_be_left_out_of_the_loss():
    cut = [replace(one, completions=tuple(replace(c, finish="length") for c in one.completions)) for one in GROUPS]
    step, _ = moved(learner(mask_truncated=True), alg.dapo(), cut)
    assert step.abs().max() == 0
    step, _ = moved(learner(mask_truncated=False), alg.dapo(), cut)
    assert step.abs().max() > 0


def test_tokens_that_a_tool_wrote_have_no_gradient():
    """The step is that of the mean over the model's own tokens, which read the tool's."""
    mask = torch.tensor([True, False, False, True])
    drawn = Completion(token_ids=torch.tensor([20, 30, 30, 21]), text="", finish="stop", mask=mask)
    step, _ = moved(learner(), alg.dapo(), [replace(GROUPS[0], completions=(drawn,), advantages=torch.tensor([1.0]))])
    policy = Policy(tiny_model("qwen2"), pad_id=0)
    logp = policy.model(torch.tensor([[5, 6, 7, 20, 30, 30, 21]])).logits[0, 2:-1].log_softmax(-1)
    logp.gather(-1, drawn.token_ids[:, None])[mask].mean().backward()
    torch.testing.assert_close(step, torch.cat([p.grad.flatten() for p in policy.parameters()]), rtol=1e-4, atol=1e-6)


def test_weights_that_are_not_finite_are_named_and_no_update_is_made_of_them():
    one = learner()
    next(one.policy.model.parameters()).data[0, 0] = float("inf")
    with pytest.raises(SpoiledError, match=r"step 7: the weight model.embed_tokens.weight holds infinity"):
        one.step(GROUPS, alg.dapo(), 7)


def test_numbers_that_are_not_finite_change_nothing():
    one = learner()
    groups = [replace(GROUPS[0], advantages=torch.tensor([float("nan"), 1.0, -1.0]))]
    before = [p.detach().clone() for p in one.policy.parameters()]
    report = one.step(groups, alg.dapo(), 7)
    assert [event.kind for event in report.events] == ["non_finite_step"]
    assert "step 7" in report.events[0].said
    assert all(torch.equal(p, b) for p, b in zip(one.policy.parameters(), before, strict=True))


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_reinforces():
    clipped, report = moved(learner(), alg.dapo())
    plain, _ = moved(learner(), alg.dapo().replace(objective=alg.policy_gradient))
    torch.testing.assert_close(clipped, plain, rtol=1e-5, atol=1e-7)
    assert report["clip_ratio/region_mean"] == 0.0


def test_annotating_measures_the_policy_and_the_reference_as_they_are():
    model = tiny_model("qwen2")
    policy = Policy(model, pad_id=0)
    one = learner(model, policy=policy, reference=FrozenCopy.of(policy), is_off_policy=True)
    algorithm = alg.grpo(kl=alg.KL(coefficient=0.1))
    first = one.annotate(GROUPS, algorithm)
    for group_ in first:
        for completion in group_.completions:
            torch.testing.assert_close(completion.old_logp, completion.ref_logp)
    moved(one, algorithm, first)
    again = one.annotate(GROUPS, algorithm)[0].completions[0]
    torch.testing.assert_close(again.ref_logp, first[0].completions[0].ref_logp, msg="the reference stands still")
    assert not torch.allclose(again.old_logp, first[0].completions[0].old_logp)


def test_mixing_the_reference_goes_from_keeping_to_copying():
    model = tiny_model("qwen2")
    policy = Policy(model, pad_id=0)
    reference = FrozenCopy.of(policy)
    start = [p.clone() for p in reference.policy.model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    reference.mix(policy, 0.0)
    assert reference.state_dict() == {}, "a reference that never moved is not saved"
    reference.mix(policy, 0.25)
    for now, before in zip(reference.policy.model.parameters(), start, strict=True):
        torch.testing.assert_close(now, before + 0.25)
    reference.mix(policy, 1.0)
    for now, theirs in zip(reference.policy.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(now, theirs)


def test_a_reference_in_bfloat16_follows_by_steps_that_bfloat16_rounds_away():
    policy = Policy(tiny_model("qwen2").to(torch.bfloat16), pad_id=0)
    reference, again = FrozenCopy.of(policy, follows=True), FrozenCopy.of(policy, follows=True)
    start = [weight.detach().float() for weight in policy.model.parameters()]
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.02)  # by a few units in the last place
    for _ in range(10):
        reference.mix(policy, 0.05)
    again.load_state_dict({name: value.clone() for name, value in reference.state_dict().items()})
    for _ in range(10):
        reference.mix(policy, 0.05)
        again.mix(policy, 0.05)
    models = (policy.model, reference.policy.model, again.policy.model)
    for before, now, mine, resumed in zip(start, *(model.parameters() for model in models), strict=True):
        expected = now.float() + 0.95**20 * (before - now.float())
        torch.testing.assert_close(mine.float(), expected, rtol=2**-8, atol=0)  # half a unit in the last place
        assert torch.equal(mine, resumed)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_a_reference_follows_a_policy_that_holds_integers_too(alpha):
    policy = Policy(tiny_model("qwen2"), pad_id=0)
    policy.model.codes = torch.nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
    reference = FrozenCopy.of(policy, follows=True)
    head = policy.model.get_input_embeddings().weight
    before = head.detach().clone()
    with torch.no_grad():
        head.add_(1.0)
    reference.mix(policy, alpha)
    torch.testing.assert_close(reference.policy.model.get_input_embeddings().weight, before + alpha)
    assert torch.equal(reference.policy.model.codes, policy.model.codes)
