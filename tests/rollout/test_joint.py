"""Joint rollouts: one decode batch for several adapters on one base, each completion with the bits of its own run's rollout."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.errors import NumericsError
from covey.process.interruption import StopNow
from covey.rollout import Drawing, JointRollouts, NativeSampler, SamplingParams
from covey.rollout.joint import _JointForward
from kit import rest_nightly, tiny_model, tiny_tokenizer

PROMPTS = ["What is 12 + 30?", "Anna had 20 pens and gave away 5.", "Tom has 3 apples."]
ADAPTERS = ({"r": 2}, {"r": 5, "target_modules": ["q_proj"]}, {"r": 3, "use_rslora": True})


@pytest.fixture
def base():
    return tiny_model(layers=2)


@pytest.fixture
def joined(monkeypatch):
    """Numbers of runs of every joint decode step."""
    found, decode = [], _JointForward.decode

    def counted(self, runs, places):
        found.append(len(places))
        return decode(self, runs, places)

    monkeypatch.setattr(_JointForward, "decode", counted)
    return found


def sampler_on(base, number, **options):
    """Sampler of an adapter of its own, in training mode with dropout, over the base's weights."""
    model = copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})
    torch.manual_seed(number)
    given = {"target_modules": "all-linear", "lora_dropout": 0.2, "init_lora_weights": False, **ADAPTERS[number % 3]}
    return NativeSampler(get_peft_model(model, LoraConfig(**given)).train(), tiny_tokenizer(), **options)


def drawing(sampler, number, n=4):
    return Drawing(sampler, PROMPTS, n, SamplingParams(max_tokens=12, seed=number))


def alone(asked):
    return list(asked.sampler.sample(asked.prompts, asked.n, asked.params))


def are_equal(ones, others):
    """True for the same groups in the same order, bit by bit."""
    pairs = [
        (one, other)
        for a, b in zip(ones, others, strict=True)
        for one, other in zip(a.completions, b.completions, strict=True)
    ]
    return all(
        torch.equal(one.token_ids, other.token_ids)
        and torch.equal(one.logprobs, other.logprobs)
        and (one.text, one.finish) == (other.text, other.finish)
        for one, other in pairs
    )


@pytest.mark.parametrize("attention", rest_nightly(["auto", "torch"], 1))
def test_each_run_draws_what_it_draws_alone(base, joined, attention):
    # waiting groups, rows that end early, and batches that fall below four rows
    asked = [drawing(sampler_on(base, i, max_rows=8, attention=attention), i, n=3 + i) for i in range(3)]
    joint = JointRollouts()
    drawn = joint(asked)
    expected = [alone(one) for one in asked]
    for one, found in zip(expected, drawn, strict=True):
        assert are_equal(one, found.groups)
    assert not are_equal([group.take(range(3)) for group in expected[0]], [g.take(range(3)) for g in expected[1]])
    assert {2, 3} <= set(joined)
    assert all(asked.sampler.model.training for asked in asked)


def test_the_base_is_multiplied_once_for_all_rows(base, monkeypatch):
    asked = [drawing(sampler_on(base, i), i) for i in range(2)]
    joint = JointRollouts()
    joint(asked)  # from now on its row counts are known
    rows, linear = [], torch.nn.functional.linear

    def counted(x, weight, *bias):
        if weight is base.model.layers[0].mlp.up_proj.weight and x.ndim == 3 and x.shape[1] == 1:
            rows.append(len(x))
        return linear(x, weight, *bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    joint(asked)
    assert rows[0] == 24
    assert rows.count(12) == 0


def test_rows_whose_bits_depend_on_their_number_are_decoded_apart(base, joined):
    asked = [drawing(sampler_on(base, i), i) for i in range(2)]
    for one in asked:
        head = one.sampler.forward.model.lm_head
        head.forward = lambda x, head=head: type(head).forward(head, x) + 1e-6 * len(x)
    joint = JointRollouts()
    drawn = joint(asked)
    assert joined
    assert not any(joint.is_equal.values())
    assert all(are_equal(alone(one), found.groups) for one, found in zip(asked, drawn, strict=True))


@pytest.mark.parametrize("error", rest_nightly([StopNow(), NumericsError("no number"), MemoryError()], 1))
def test_an_error_of_one_run_leaves_the_others_their_completions(base, error, caplog):
    tokens = iter(range(99))

    def stops():
        if next(tokens) == 2:
            raise error

    asked = [drawing(sampler_on(base, i), i) for i in range(3)]
    asked[1].sampler.check_stop = stops
    drawn = JointRollouts()(asked)
    is_memory = isinstance(error, MemoryError)  # then it is drawn alone, in smaller batches
    assert drawn[1] is (None if is_memory else error)
    assert ("1 of its 3 runs draw alone" in caplog.text) == is_memory
    assert all(are_equal(alone(asked[i]), drawn[i].groups) for i in (0, 2))


def test_a_forward_of_the_learners_own_is_put_back(base):
    drawings = [drawing(sampler_on(base, i), i) for i in range(2)]
    own = {}
    for i, each in enumerate(drawings):
        for name, module in each.sampler.forward.model.named_modules():
            if hasattr(module, "lora_A"):
                own[i, name] = module, module.forward
                module.__dict__["forward"] = module.forward
    assert all(found is not None for found in JointRollouts()(drawings))
    assert own
    assert all(module.__dict__["forward"] == forward for module, forward in own.values())


def test_an_error_of_a_step_that_one_run_takes_alone_leaves_the_others_theirs(base, monkeypatch):
    monkeypatch.setattr("covey.rollout.joint.MOST_ROWS", 24)
    drawings = [drawing(sampler_on(base, i), i) for i in range(3)]  # 12 rows each: the third decodes apart
    error = NumericsError("no number")

    def fails(*args):
        raise error

    monkeypatch.setattr(drawings[2].sampler.forward, "decode", fails)
    drawn = JointRollouts()(drawings)
    assert drawn[2] is error
    monkeypatch.undo()
    assert all(are_equal(alone(drawings[i]), drawn[i].groups) for i in (0, 1))


def test_memory_that_runs_out_in_the_joint_step_leaves_every_run_to_itself(base, monkeypatch, caplog):
    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(_JointForward, "decode", full)
    assert JointRollouts()([drawing(sampler_on(base, i), i) for i in range(2)]) == [None, None]
    assert "Memory ran out in a joint rollout" in caplog.text


def test_only_runs_on_one_base_in_its_own_precision_are_joined(base, joined):
    other = tiny_model("llama", layers=2)
    whole = NativeSampler(base, tiny_tokenizer(), dtype="float32")
    unseeded = Drawing(sampler_on(base, 0), PROMPTS, 2, SamplingParams(max_tokens=3))
    copied = drawing(sampler_on(base, 1, dtype="bfloat16"), 0)
    asked = [drawing(sampler_on(base, 2), 0), drawing(sampler_on(other, 0), 1), drawing(whole, 2), unseeded, copied]
    assert JointRollouts()(asked) == [None] * 5
    assert joined == []


def test_rows_beyond_the_largest_batch_are_decoded_apart(base, joined, monkeypatch):
    monkeypatch.setattr("covey.rollout.joint.MOST_ROWS", 24)
    asked = [drawing(sampler_on(base, i), i) for i in range(3)]  # 12 rows each
    drawn = JointRollouts()(asked)
    assert joined[0] == 2
    assert all(are_equal(alone(one), found.groups) for one, found in zip(asked, drawn, strict=True))
