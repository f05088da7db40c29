"""What the sampler leaves of its products for the learner: the same gradient without multiplying again, and nothing where it cannot be."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from covey import GRPOConfig, GRPOTrainer, compiled, products
from covey import algorithms as alg
from covey.compiled import live
from covey.compiled.linear import kernels as pairs
from covey.errors import ConfigError
from covey.learner import FrozenCopy, Policy, memory
from covey.learner.gaps import difference
from covey.learner.packing import rows_of
from covey.models import checkpoint_activations
from covey.outputs import Outputs, Replay
from covey.reuse import why_not
from covey.rollout import NativeSampler, SamplingParams
from covey.types import TokenBatch
from kit import learner_of, live_kernels, tiny_model, tiny_tokenizer

needs_pairs = pytest.mark.skipif(pairs() is None, reason="this processor does not multiply bfloat16 in pairs")
pytestmark = pytest.mark.skipif(compiled.why_not() is not None, reason="kernels cannot be compiled here")

TEXTS = ("2 + 2 =", "Tom has 3 apples and buys 4 more. How many?", "a", "What is 12 + 30?")
PARAMS = SamplingParams(max_tokens=30, seed=3)
OFTEN = list(range(0, 300, 16))
"""Tokens that end a completion."""
SHAPE = {"layers": 2, "hidden": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A decode step in float32 is one call on any processor that tests run on."""
    found = live_kernels()
    monkeypatch.setattr(live, "kernels", lambda: found)
    monkeypatch.setattr(live, "is_for_live_weights", lambda: True)


@pytest.fixture
def multiplied(monkeypatch):
    """Rows of each product that is computed where outputs are known, and of the last of each layer wherever it is."""
    rows, real = [], products.forward

    def forward(x, weight, bias):
        rows.append(x.numel() // x.shape[-1])
        return real(x, weight, bias)

    monkeypatch.setattr(products, "forward", forward)
    return rows


def drawn(model, outputs, *, n=4, params=PARAMS, dtype=torch.float32, texts=TEXTS, **given):
    """Judged groups by a sampler that leaves what it computes in `outputs`."""
    sampler = NativeSampler(model, tiny_tokenizer(), dtype=str(dtype).removeprefix("torch."), **given)
    sampler.keep(outputs)
    sampler.load(model, version=0)
    with outputs.filling():
        groups = list(sampler.sample(texts, n, params))
    return [replace(group, advantages=torch.linspace(-1, 1, n)) for group in groups]


def learner(model, outputs=None, **given):
    policy = Policy(model, pad_id=0, outputs=outputs, compute_dtype=given.pop("compute_dtype", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return learner_of(policy, optimizer, max_completion_length=30, max_grad_norm=0.0, **given)


def gradient(one, groups, algorithm=None):
    found = []
    one.before_update = lambda: found.extend(p.grad.flatten().clone() for p in one.policy.parameters())
    algorithm = algorithm or alg.grpo(kl=None)
    one.step(one.annotate(groups, algorithm), algorithm, 1)
    return torch.cat(found)


def assert_same_gradient(model, groups, outputs, tolerance=1e-5, algorithm=None, **given):
    mine = gradient(learner(model, outputs, **given), groups, algorithm)
    expected = gradient(learner(model, **given), groups, algorithm)
    assert expected.norm() > 0
    assert (mine - expected).norm() < tolerance * expected.norm()


def tokens_fed(groups):
    """Of completions, all but the last."""
    return sum(max(0, completion.num_tokens - 1) for group in groups for completion in group.completions)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama", "mistral"])
def test_the_gradient_is_that_of_a_forward_pass_that_multiplies(arch, multiplied):
    model, outputs = tiny_model(arch, **SHAPE), Outputs(2**28)
    groups = drawn(model, outputs)
    mine = gradient(learner(model, outputs, max_rows=16), groups)
    computed = multiplied[-14:]  # seven products in each of two layers
    expected = gradient(learner(model, max_rows=16), groups)
    assert (mine - expected).norm() < 1e-5 * expected.norm()
    fewest = min(completion.num_tokens for group in groups for completion in group.completions)
    assert max(computed) <= multiplied[-1] - tokens_fed(groups) + max(fewest, 30) + 8  # some are compared


@pytest.mark.parametrize("max_rows", [1, 3, 16])
def test_it_is_the_same_whatever_the_micro_batches(max_rows):
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    groups = drawn(model, outputs)
    assert_same_gradient(model, groups, outputs, max_rows=max_rows)


def test_completions_that_come_and_go_keep_their_own_rows():
    """Fewer in flight than there are: rows move, and places are taken by others."""
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    groups = drawn(
        model, outputs, n=3, texts=[f"{text} {i}" for i in range(3) for text in TEXTS], max_rows=6, eos_ids=OFTEN
    )
    lengths = {completion.num_tokens for group in groups for completion in group.completions}
    assert len(lengths) > 5
    for row in rows_of(groups):
        places = outputs.rows_of(row.completion.token_ids, row.prompt.token_ids)
        assert len(places) == max(0, row.completion.num_tokens - 1)
        assert bool((places >= 0).all())
    assert_same_gradient(model, groups, outputs, max_rows=8)


def test_recomputed_activations_take_them_twice(multiplied):
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    expected = gradient(learner(model), drawn(model, outputs))
    groups = drawn(model, outputs)
    checkpoint_activations(model, {"use_reentrant": False})
    multiplied.clear()
    mine = gradient(learner(model, outputs, max_rows=16), groups)
    assert len(multiplied) > 14
    assert max(multiplied[-28:]) < tokens_fed(groups) / 2
    assert (mine - expected).norm() < 1e-5 * expected.norm()


@needs_pairs
@pytest.mark.parametrize("max_rows", [4, 16])
def test_in_bfloat16_it_differs_by_rounding(max_rows, monkeypatch):
    monkeypatch.setattr(products, "SMALLEST", 1)
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    groups = drawn(model, outputs, dtype=torch.bfloat16)
    assert outputs.slabs
    assert_same_gradient(model, groups, outputs, 0.1, max_rows=max_rows, compute_dtype=torch.bfloat16)


def test_a_reference_and_old_log_probabilities_are_those_of_their_own_weights():
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    reference = FrozenCopy.of(Policy(tiny_model(**SHAPE, seed=1), pad_id=0, outputs=outputs))
    groups = drawn(model, outputs)
    assert_same_gradient(model, groups, outputs, algorithm=alg.grpo(kl=0.5), reference=reference, is_off_policy=True)


def test_when_any_parameter_has_changed_nothing_is_taken(multiplied):
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    groups = drawn(model, outputs)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    mine = gradient(learner(model, outputs), groups)
    plain = list(multiplied)
    multiplied.clear()
    assert torch.equal(gradient(learner(model), groups), mine)
    assert multiplied == plain


def test_what_does_not_fit_is_computed():
    model = tiny_model(**SHAPE)
    width = sum(linear.out_features for linear in model.model.modules() if isinstance(linear, torch.nn.Linear))
    outputs = Outputs(100 * 4 * width)
    groups = drawn(model, outputs)
    kept = [outputs.rows_of(row.completion.token_ids, row.prompt.token_ids) for row in rows_of(groups)]
    assert 0 < sum(int((rows >= 0).sum()) for rows in kept) <= 100 < tokens_fed(groups)
    assert_same_gradient(model, groups, outputs, max_rows=16)


def test_other_tokens_or_another_prompt_are_not_known():
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    group = drawn(model, outputs, texts=TEXTS[:1])[0]
    one, prompt = group.completions[0], group.prompt.token_ids
    assert outputs.rows_of(one.token_ids, prompt) is not None
    assert outputs.rows_of(one.token_ids.clone(), prompt) is None
    assert outputs.rows_of(one.token_ids, prompt[1:]) is None


def test_what_an_environment_says_is_computed_with_the_rest():
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    asked = []

    def environment(turns):
        asked.extend(turns)
        return ["5 + 5" if len(asked) % 2 else None for _ in turns]

    groups = drawn(model, outputs, eos_ids=OFTEN, environment=environment)
    assert any(
        completion.mask is not None and not bool(completion.mask.all()) for g in groups for completion in g.completions
    )
    assert_same_gradient(model, groups, outputs, max_rows=16)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_outputs_of_other_weights_are_seen_and_not_taken(is_checkpointed, caplog):
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    groups = drawn(model, outputs)
    outputs.slabs[3].mul_(1.1)
    if is_checkpointed:
        checkpoint_activations(model, {"use_reentrant": False})
    with caplog.at_level(logging.WARNING):
        assert_same_gradient(model, groups, outputs, max_rows=16)
    assert "The sampler's products differ by" in caplog.text


def test_weights_that_somebody_writes_to_after_the_sampler_took_them_are_other_ones():
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32")
    sampler.keep(outputs)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with outputs.filling():
        (group,) = sampler.sample(TEXTS[:1], 2, PARAMS)
    policy = Policy(model, pad_id=0, outputs=outputs)
    assert policy.measure(rows_of([replace(group, advantages=torch.ones(2))]), reuse=True).fresh is None


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_pairs)])
def test_tokens_are_the_same_whether_or_not_anything_is_kept(dtype):
    ids = []
    for most in (2**28, 2**18, 0):
        groups = drawn(tiny_model(**SHAPE), Outputs(most), dtype=dtype)
        ids.append([completion.token_ids.tolist() for group in groups for completion in group.completions])
    assert ids[0] == ids[1] == ids[2]


def test_one_completion_of_each_forward_pass_still_compares_sampler_and_learner():
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    groups = drawn(model, outputs, eos_ids=OFTEN)
    rows = rows_of(groups)
    measured = Policy(model, pad_id=0, outputs=outputs).measure(rows, reuse=True)
    assert int(measured.fresh.sum()) == 1
    assert rows[int(measured.fresh.nonzero())].completion.num_tokens == min(
        row.completion.num_tokens for row in rows if row.completion.num_tokens > 1
    )
    sampled = torch.nn.utils.rnn.pad_sequence([row.completion.logprobs for row in rows], batch_first=True)
    off = sampled + torch.where(measured.fresh, 0.5, 0.0)[:, None]
    mask = torch.nn.utils.rnn.pad_sequence([row.counts for row in rows], batch_first=True)
    tokens = TokenBatch(
        logp=measured.logp,
        old_logp=measured.logp,
        advantages=off,
        mask=mask,
        sampler_logp=off,
        group=torch.zeros(len(rows)),
    )
    found = difference(tokens, measured.fresh)["sampling/sampling_logp_difference/mean"].value
    assert abs(found - 0.5) < 1e-4


def test_when_memory_runs_out_it_is_given_back_first():
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    groups = drawn(model, outputs)
    one = learner(model, outputs, max_rows=16)
    tries = []

    def work():
        tries.append(outputs.slabs)
        if len(tries) == 1:
            raise MemoryError("cannot allocate memory")
        return one.policy.measure(rows_of(groups), reuse=True)

    found = one.room.attempt(work)
    (event,) = one.room.take_events()
    assert not outputs.slabs
    assert one.room.max_rows == 16
    assert "not kept for the update any more" in event.said
    assert found.fresh is None
    resumed = learner(model, Outputs(2**28))
    resumed.room.load_state_dict(one.room.state_dict())
    assert resumed.policy.outputs.most_bytes == 0


def test_only_what_is_drawn_to_learn_from_is_kept():
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32")
    sampler.keep(outputs)
    list(sampler.sample(TEXTS[:1], 2, PARAMS))
    assert not outputs.slabs


def test_new_weights_forget_it_and_use_its_memory_again():
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32")
    sampler.keep(outputs)
    places = []
    for version in range(2):
        sampler.load(model, version=version)
        with outputs.filling():
            (group,) = sampler.sample(TEXTS[:1], 2, PARAMS)
        places.append([slab.data_ptr() for slab in outputs.slabs])
    assert places[0] == places[1]
    assert int(outputs.rows_of(group.completions[0].token_ids, group.prompt.token_ids)[0]) < 2 * 30


# -- by the options -------------------------------------------------------------------------------------------------


def trained(tmp_path, model=None, **changed):
    given = {"gradient_checkpointing": False, "learning_rate": 1e-2, "max_steps": 3, "report_to": "none"}
    given |= {"save_strategy": "no", "disable_tqdm": True, "max_completion_length": 8, "per_device_train_batch_size": 8}
    adapter = changed.pop("peft_config", None)
    trainer = GRPOTrainer(
        model=model or tiny_model(**SHAPE),
        reward_funcs=lambda completion_ids, **columns: [float(len(set(ids))) for ids in completion_ids],
        args=GRPOConfig(output_dir=str(tmp_path / "out"), use_cpu=True, **{**given, **changed}),
        train_dataset=Dataset.from_list([{"prompt": text} for text in TEXTS]),
        processing_class=tiny_tokenizer(),
        peft_config=adapter,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options, keeps",
    [
        ({}, True),
        ({"model": {}}, False),  # too narrow to be worth it
        ({"model": {}, "reuse_rollout": True}, True),
        ({"num_iterations": 2}, True),
        ({"reuse_rollout": False}, False),
        ({"gradient_checkpointing": True}, False),
        ({"gradient_checkpointing": True, "reuse_rollout": True}, True),
        ({"rollout_backend": "transformers"}, False),
        ({"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}, False),
    ],
)
def test_a_run_takes_them_where_they_are_wanted_and_right(options, keeps, tmp_path, monkeypatch):
    taken, real = [], Replay.product
    monkeypatch.setattr(Replay, "product", lambda self, *given: taken.append(self) or real(self, *given))
    model = tiny_model(**{**SHAPE, **options.get("model", {"hidden": memory.WORTH_KEEPING})})
    found = trained(tmp_path, **{**options, "model": model})
    assert bool(taken) == keeps
    assert not found._parts.outputs.slabs  # a run that has ended holds no memory


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"rollout_backend": "transformers"}, "not drawn by the native engine"),
        ({"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}, "adds an adapter"),
        ({"model": {"arch": "gpt2"}}, "no kernels of this processor decode this model"),
        ({"model": {"attention_dropout": 0.1}}, "layers drop numbers at random"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "computed again by means of their own",
        ),
    ],
)
def test_what_is_asked_for_and_cannot_be_had_is_refused(options, reason, tmp_path):
    options = {**options, "model": tiny_model(**options["model"])} if "model" in options else options
    with pytest.raises(ConfigError, match=f"reuse_rollout=True, but .*{reason}"):
        trained(tmp_path, reuse_rollout=True, **options)


def test_one_of_several_processes_keeps_nothing():
    model = tiny_model(**SHAPE)
    policy, sampler = Policy(model, pad_id=0), NativeSampler(model, tiny_tokenizer(), dtype="float32")
    assert "one process draws" in why_not(policy, sampler, torch.float32, SimpleNamespace(size=2))
    assert why_not(policy, sampler, torch.float32, SimpleNamespace(size=1)) is None


def test_a_run_ends_where_one_that_computes_everything_ends(tmp_path):
    """By plain gradient descent: Adam makes a step of a gradient's last bit."""
    start = torch.cat([parameter.detach().flatten() for parameter in tiny_model(**SHAPE).parameters()])
    ends = []
    for reuse in (True, False):
        model = tiny_model(**SHAPE)
        options = {"num_iterations": 2, "beta": 0.1, "optim": "sgd", "learning_rate": 0.1}
        trained(tmp_path / str(reuse), model, reuse_rollout=reuse, **options)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert (ends[0] - ends[1]).norm() < 1e-4 * (ends[1] - start).norm()


def test_the_estimate_counts_them_where_the_sampler_can_leave_them(monkeypatch):
    monkeypatch.setattr(memory, "is_for_live_weights", lambda: True)
    model, outputs = tiny_model(**SHAPE), Outputs(2**28)
    given = {
        "weight_bytes": 4,
        "compute_bytes": 4,
        "optimizer": "sgd",
        "rows": 8,
        "prompt_tokens": 9,
        "completion_tokens": 30,
    }
    given |= {
        "max_tokens": None,
        "logits_chunk": 64,
        "is_checkpointed": False,
        "has_reference": False,
        "adapter_rank": None,
    }
    guess = lambda model, **changed: memory.estimate(
        memory.Shape.of_model(model),
        prompts=4,
        group=4,
        is_on_heap=True,
        **{**given, "output_bytes": 2**28, **changed},
    )
    drawn(model, outputs)
    assert guess(model).outputs == sum(slab.nbytes for slab in outputs.slabs)
    assert guess(model).peak - guess(model, output_bytes=0).peak == guess(model).outputs
    for nothing in (guess(model, adapter_rank=2), guess(model, compute_bytes=2), guess(tiny_model("gpt2"))):
        assert nothing.outputs == 0
