"""Models whose layers keep a state: the native engine computes a prompt's state once, copies it for each completion, and stays exact."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import pytest
import torch
from causal_classes import WITH_STATES as KINDS
from causal_classes import build
from plain_sampling import collect, ids_of
from static_runs import expect_states_of_replayed_steps, record, sampler_of

from covey.kernels import in_place_steps, state_steps
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.agreement import plain_logprobs, reason_against
from covey.rollout.cuda_graphs import Captured
from covey.rollout.forward import ModulesForward
from covey.rollout.kernel_choice import verified_attention
from covey.rollout.kv_cache import KVCache
from covey.types import Prompt
from kit import rest_nightly, tiny_tokenizer

LENGTHS = (9, 1, 3, 9, 40, 2, 17)
PROMPTS = [Prompt(uid=str(i), token_ids=tuple(range(5 + i, 5 + i + n))) for i, n in enumerate(LENGTHS)]
ENDS = list(range(3, 40))
"""End-of-text ids: completions are 1 to 24 tokens long."""


def sampler_for(kind, **options):
    return NativeSampler(build(kind), tiny_tokenizer(), eos_ids=ENDS, dtype="float32", **options)


def gap_of(sampler, groups):
    """Largest difference of a written token's log-probability from a plain forward's."""
    gaps = [
        (one.logprobs - own)[one.written].abs().max()
        for group, owns in zip(groups, _split(plain_logprobs(sampler.model, groups), groups), strict=True)
        for one, own in zip(group.completions, owns, strict=True)
    ]
    return float(max(gaps))


def _split(values, groups):
    rest = iter(values)
    return [[next(rest) for _ in group.completions] for group in groups]


@pytest.mark.parametrize(
    "kind, temperature",
    rest_nightly(
        product(KINDS, (1.0, 0.0)),
        {("qwen3_5_text", 1.0), ("falcon_h1", 1.0)},
    ),
)
def test_log_probabilities_equal_a_plain_forward_whatever_enters_and_leaves(kind, temperature):
    sampler = sampler_for(kind, max_rows=8)
    assert sampler.forward.states is not None
    groups = collect(sampler, PROMPTS, 3, SamplingParams(max_tokens=24, seed=1, temperature=temperature))
    assert [len(group.prompt.token_ids) for group in groups] == list(LENGTHS)
    assert len({one.num_tokens for group in groups for one in group.completions}) > (2 if temperature else 1)
    assert gap_of(sampler, groups) <= 1e-5


@pytest.mark.parametrize("is_static", [False, True])
def test_the_cache_of_a_call_is_freed_as_it_ends(is_static, monkeypatch):
    """Without a garbage collection: a learner's step needs its memory."""
    caches, made = [], KVCache.__init__
    monkeypatch.setattr(
        KVCache, "__init__", lambda self, *a, **options: caches.append(weakref.ref(self)) or made(self, *a, **options)
    )
    sampler = sampler_for("falcon_h1")
    sampler.is_static = is_static
    gc.disable()
    try:
        collect(sampler, PROMPTS[:2], 2, SamplingParams(max_tokens=3, seed=1))
        assert [cache() for cache in caches[-1:]] == [None]
    finally:
        gc.enable()


@pytest.mark.nightly  # neither do log-probabilities, in the test above
@pytest.mark.parametrize("kind", ["qwen3_5_text", "recurrent_gemma", "mamba2"])
def test_completions_do_not_depend_on_the_batch(kind):
    sampler, params = sampler_for(kind), SamplingParams(max_tokens=16, seed=3)
    together = ids_of(collect(sampler, PROMPTS, 4, params))
    sampler.max_rows = 4
    assert ids_of(collect(sampler, PROMPTS, 4, params)) == together
    assert [ids_of(collect(sampler, [prompt], 4, params))[0] for prompt in PROMPTS] == together


@pytest.mark.parametrize("kind", rest_nightly(["mamba2", "qwen3_5_text", "recurrent_gemma"], 1))
def test_replies_of_an_environment_enter_the_state_of_their_row(kind):
    def environment(turns):
        return [[60, 61, 62 + turn.sample] if len(turn.token_ids) < 9 else None for turn in turns]

    sampler = sampler_for(kind, environment=environment, max_rows=6)
    groups = collect(sampler, PROMPTS, 3, SamplingParams(max_tokens=24, seed=1))
    masks = [one.mask for group in groups for one in group.completions]
    assert sum(int((~mask).sum()) for mask in masks) > 20
    assert gap_of(sampler, groups) <= 1e-5


@pytest.mark.parametrize("kind", rest_nightly(["qwen3_5_text", "falcon_h1"], 1))
def test_a_prompt_is_computed_once_for_its_group(kind):
    sampler, computed = sampler_for(kind), []
    hook = sampler.model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: computed.append(given[0].shape) if given[0].shape[-1] > 1 else None
    )
    list(sampler.sample(PROMPTS, 4, SamplingParams(max_tokens=2, seed=1)))
    hook.remove()
    assert sum(shape.numel() for shape in computed) == sum(length - 1 for length in LENGTHS if length > 2)
    assert len(computed) == len({length for length in LENGTHS if length > 2})


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_nightly(KINDS, ("lfm2",)))
def test_steps_on_static_buffers_hand_on_the_states(kind):
    """Recorded as a CUDA graph is captured, with the operations of a GPU, where no step is in place."""
    model, tokenizer, made = build(kind), tiny_tokenizer(), []
    sampler, eager = (sampler_of(model, tokenizer, max_rows=8, eos_ids=ENDS) for _ in range(2))
    sampler.static.captures, sampler.static.new_capture = True, lambda: record
    sampler.static.new_steps = lambda: made.append(Captured(record)) or made[-1]
    sampler.forward.steps = eager.forward.steps = []
    expect_states_of_replayed_steps(sampler, made, eager, 1e-5)


def test_new_weights_are_read_and_the_model_is_given_back_as_it_was():
    sampler = sampler_for("recurrent_gemma")
    sampler.model.train()
    held = lambda: {
        (name, key)
        for name, module in sampler.model.named_modules()
        for key, x in vars(module).items()
        if torch.is_tensor(x)
    }
    list(sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=4, seed=1)))
    assert not held()
    assert all(module.training for module in sampler.model.modules())
    with torch.no_grad():
        for parameter in sampler.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    sampler.load(sampler.model, version=2)
    assert gap_of(sampler, list(sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=4, seed=1)))) <= 1e-5


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_gated_delta_step_in_place_equals_transformers(heads):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as source

    random = torch.Generator().manual_seed(heads)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    query, key, value = draw(3, 1, heads, 8), draw(3, 1, heads, 8), draw(3, 1, 4, 6)
    g, beta, state = -draw(3, 1, 4).abs(), draw(3, 1, 4).sigmoid(), draw(3, 4, 8, 6)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    reference = source.torch_recurrent_gated_delta_rule
    repeated = (x.repeat_interleave(4 // heads, 2) for x in (query, key))
    out, after = reference(*repeated, value, g, beta, initial_state=state.clone(), **options)
    (_, _, step), *_ = (one for one in state_steps(build("qwen3_5_text")) if one[1].endswith("delta_rule"))
    mine, held = step(query, key, value, g=g, beta=beta, initial_state=state, **options)
    assert held is state
    torch.testing.assert_close(mine, out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state, after, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_plain, is_gated", [(True, False), (True, True), (False, False)])
def test_a_mamba2_step_in_place_equals_transformers(is_plain, is_gated, monkeypatch):
    """Where heads have one step size and one decay, with the gate of Falcon-H1 too; elsewhere the reference has to compute."""
    from transformers.models.bamba import modeling_bamba as source

    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    dt, a, bias = draw(3, 4, 1).expand(-1, -1, 5), -draw(4, 1, 1).abs(), draw(4, 1).expand(-1, 5)
    a = a.expand(-1, 5, 6)
    if not is_plain:
        dt, a = draw(3, 4, 5), -draw(4, 5, 6).abs()
    given = (draw(3, 4, 5), dt, a, draw(3, 2, 6), draw(3, 2, 6), draw(4, 1).expand(-1, 5))
    state, options = draw(3, 4, 5, 6), {"z": draw(3, 4, 5) if is_gated else None, "dt_bias": bias, "dt_softplus": True}
    after = state.clone()
    out = source.mamba2_selective_state_update(after, *given, **options)
    if is_plain:
        monkeypatch.setattr(source, "mamba2_selective_state_update", None)  # nothing can fall back to it
    (_, _, step), *_ = (one for one in state_steps(build("bamba")) if one[1].startswith("mamba2"))
    torch.testing.assert_close(step(state, *given, **options), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, after, atol=1e-6, rtol=1e-5)


def test_contexts_of_several_engines_overlap_and_the_last_puts_transformers_functions_back():
    """As of engines in threads: the one that began first may end first."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as source

    before = source.torch_recurrent_gated_delta_rule
    one, other = (in_place_steps(state_steps(build("qwen3_5_text"))) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert source.torch_recurrent_gated_delta_rule is not before
    other.__exit__(None, None, None)
    assert source.torch_recurrent_gated_delta_rule is before


def test_a_step_with_gradients_keeps_the_state_that_they_need():
    """A learner may compute in one thread while an engine of the same code decodes in another."""
    (_, _, step), *_ = (entry for entry in state_steps(build("qwen3_5_text")) if entry[1].endswith("delta_rule"))
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    state, value = draw(2, 4, 8, 6), draw(2, 1, 4, 6).requires_grad_()
    held = state.clone()
    _, after = step(
        draw(2, 1, 4, 8), draw(2, 1, 4, 8), value, g=-draw(2, 1, 4).abs(), beta=draw(2, 1, 4).sigmoid(), initial_state=state,
        output_final_state=True,
    )  # fmt: skip
    after.sum().backward()
    assert torch.equal(state, held)
    assert value.grad.abs().sum() > 0


def test_the_steps_of_transformers_come_back_after_sampling():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as source

    before = source.torch_recurrent_gated_delta_rule
    seen = []
    sampler = sampler_for("qwen3_5_text", check_stop=lambda: seen.append(source.torch_recurrent_gated_delta_rule))
    list(sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=3, seed=1)))
    assert set(seen) == {before}
    assert source.torch_recurrent_gated_delta_rule is before


@pytest.mark.parametrize("kind", rest_nightly(["qwen3_5_text", "mamba2"], ["mamba2"]))
def test_in_bfloat16_completions_are_the_policys_up_to_rounding(kind):
    model = build(kind)
    sampler = NativeSampler(model, tiny_tokenizer(), eos_ids=ENDS, dtype="bfloat16", max_rows=6)
    assert sampler.forward.dtype == torch.bfloat16
    assert reason_against(sampler, model) is None


@pytest.mark.parametrize("kind", rest_nightly(KINDS, 2))
def test_steps_on_static_buffers_pass_their_check(kind):
    """The check computes padding rows as every step does: buffers of states hold a bucket."""
    model = build(kind)
    assert verified_attention(ModulesForward(model), model, "torch") == "torch"
