"""Decode steps on static buffers, as a GPU replays them: here eagerly, and replayed by a recorder that keeps the same rules.

`Recording` is what a CUDA graph is: the operations of one run, on the tensors of that run, without Python between them. It
refuses what a capture refuses, values that go from the device to the host or back.
"""

import pytest
import torch
from plain_sampling import TEXTS, collect, ids_of
from static_runs import (
    PROMPTS,
    WAYS,
    finishes_of,
    keeping_sampler,
    logprobs_of,
    record,
    sampler_of,
    writer,
)

from covey.errors import ConfigError
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.cuda_graphs import Captured
from covey.rollout.graph_scheduler import GraphScheduler, LateCount
from covey.rollout.kv_cache import LayerShape
from covey.rollout.softmax_attention import HIDDEN, ScoreRule
from covey.rollout.static_kv_cache import NEVER, StaticKVCache, bucket, columns_for, rows_for
from covey.rollout.thinking import ThinkingBudget
from kit import tiny_model, tiny_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize(
    "way, max_rows",
    [("rich", 9)]
    + [
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (("top_p", 256), ("plain", 9), ("plain", 256), ("greedy", 9), ("top_p", 9))
    ],
)
def test_steps_on_static_buffers_give_the_same_completions(tokenizer, way, max_rows):
    """Bucketed rows, rows that have ended but are still there, admission, growth and shifting of the cache change nothing."""
    model, params = writer(), SamplingParams(max_tokens=80, seed=7, **WAYS[way])
    expected = collect(NativeSampler(model, tokenizer, dtype="float32", max_rows=max_rows), PROMPTS, 4, params)
    groups = collect(sampler_of(model, tokenizer, max_rows=max_rows), PROMPTS, 4, params)
    assert ids_of(groups) == ids_of(expected)
    assert finishes_of(groups) == finishes_of(expected)
    torch.testing.assert_close(logprobs_of(groups), logprobs_of(expected), atol=2e-5, rtol=0)  # sums of another order
    if way == "plain":
        assert len({c.num_tokens for group in groups for c in group.completions}) > 15


@pytest.mark.parametrize(
    "arch, way",
    [
        ("gpt2", "rich"),
        pytest.param("qwen2", "plain", marks=pytest.mark.nightly),
        pytest.param("qwen3", "greedy", marks=pytest.mark.nightly),
        pytest.param("llama", "top_p", marks=pytest.mark.nightly),
        pytest.param("gemma2", "plain", marks=pytest.mark.nightly),
    ],
)
def test_a_step_can_be_captured_and_its_replays_change_no_bit(tokenizer, arch, way):
    """Nothing of a step asks the host for a value, and nothing that the host knows is frozen into it."""
    model, params = writer(arch), SamplingParams(max_tokens=80, seed=7, **WAYS[way])
    expected = collect(sampler_of(model, tokenizer, max_rows=9), PROMPTS[:5], 3, params)
    steps = Captured(record)
    groups = collect(sampler_of(model, tokenizer, steps, max_rows=9), PROMPTS[:5], 3, params)
    assert steps.reason is None
    assert steps.num_captured > 1
    assert steps.num_replayed > 5 * steps.num_captured
    assert ids_of(groups) == ids_of(expected)
    assert torch.equal(logprobs_of(groups), logprobs_of(expected))


@pytest.mark.nightly
def test_captures_are_made_for_each_bucket_of_rows_and_again_when_buffers_have_moved(tokenizer):
    keys = []

    class Noting(Captured):
        def run(self, key, epoch, step):
            keys.append((key, epoch))
            return super().run(key, epoch, step)

    steps = Noting(record)
    collect(sampler_of(writer(), tokenizer, steps), PROMPTS, 8, SamplingParams(max_tokens=150, seed=1))
    assert len({rows for (rows, *_), _ in keys}) > 3
    assert all(rows == rows_for(rows, 72) for (rows, *_), _ in keys)
    assert len({epoch for _, epoch in keys}) > 2
    often = {key for key in keys if keys.count(key) > 1}
    assert steps.num_captured == len(often)
    assert steps.num_replayed == len(keys) - len(set(keys))


def test_a_step_that_cannot_be_captured_runs_as_it_is_written_and_is_not_tried_again(tokenizer, caplog):
    model, params = writer("gpt2"), SamplingParams(max_tokens=30, seed=7)
    expected = collect(sampler_of(model, tokenizer), PROMPTS, 2, params)
    forward = model.transformer.ln_f.forward
    model.transformer.ln_f.forward = lambda x: forward(x) * float(x.abs().max() > -1)
    sampler = keeping_sampler(model, tokenizer)
    groups = collect(sampler, PROMPTS, 2, params)
    assert ids_of(groups) == ids_of(expected)
    assert not sampler.static.captures
    assert ids_of(collect(sampler, PROMPTS, 2, params)) == ids_of(expected)
    (said,) = [record.message for record in caplog.records if record.name == "covey.rollout.cuda_graphs"]
    assert said == (
        "Decoding goes on without CUDA graphs: the step cannot be captured "
        "(operation not permitted while capturing: _local_scalar_dense)."
    )


@pytest.mark.parametrize("has_budget", [False, True])
def test_an_environment_answers_between_static_steps(tokenizer, has_budget):
    """Also one that opens thoughts again, which a budget closes."""
    model, params = writer(), SamplingParams(max_tokens=60, seed=3)
    answer = tokenizer("42 ")["input_ids"]
    replies = lambda turns: [answer if len(turn.token_ids) < 40 else None for turn in turns]
    if has_budget:
        answer = tokenizer("<think>")["input_ids"]
        replies = ThinkingBudget.of(tokenizer, 4, replies)
    expected = collect(NativeSampler(model, tokenizer, dtype="float32", environment=replies), PROMPTS[:5], 3, params)
    steps = Captured(record)
    groups = collect(sampler_of(model, tokenizer, steps, environment=replies, max_rows=9), PROMPTS[:5], 3, params)
    assert steps.num_replayed > 20
    assert ids_of(groups) == ids_of(expected)
    masks = [[c.mask.tolist() for c in group.completions] for group in groups]
    assert masks == [[c.mask.tolist() for c in group.completions] for group in expected]
    assert any(not all(mask) for group in masks for mask in group)
    assert any("\n</think>\n\n" in c.text for group in groups for c in group.completions) == has_budget


def test_rows_that_have_ended_wait_until_some_can_be_taken_out_together(tokenizer):
    waiting = []
    retire = GraphScheduler._retire

    def watched(self, ends, stops):
        waiting.append((int(ends.sum()), self.num_rows))
        return retire(self, ends, stops)

    params = SamplingParams(max_tokens=120, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphScheduler, "_retire", watched)
        groups = collect(sampler_of(writer(), tokenizer), TEXTS, 64, params)
    assert len({c.num_tokens for group in groups for c in group.completions}) > 2 * len(waiting)
    assert sum(ended for ended, _ in waiting) == 64 * len(TEXTS)
    plain = collect(NativeSampler(writer(), tokenizer, dtype="float32"), TEXTS, 64, params)
    assert ids_of(groups) == ids_of(plain)


def test_the_host_reads_a_count_one_look_later_and_only_of_the_same_rows():
    late = LateCount()
    assert [late.next(torch.tensor(count)) for count in (3, 4, 9)] == [0, 3, 4]
    late.forget()
    assert [late.next(torch.tensor(count)) for count in (1, 2)] == [0, 1]


def test_the_host_waits_for_the_last_steps_only_where_a_group_reaches_its_limit(tokenizer, monkeypatch):
    """Rows without an end of sequence: every look but the last is one behind, and no window is decoded in vain."""
    looks, steps, one = [], [], GraphScheduler._one
    monkeypatch.setattr(LateCount, "next", lambda self, count: looks.append(count) or 0)
    monkeypatch.setattr(GraphScheduler, "_one", lambda self, rows: steps.append(rows) or one(self, rows))
    sampler = sampler_of(writer(), tokenizer, eos_ids=())
    groups = collect(sampler, PROMPTS[:2], 4, SamplingParams(max_tokens=40, seed=1))
    assert {c.num_tokens for group in groups for c in group.completions} == {40}
    assert (len(steps), len(looks)) == (40, 9)


def test_buckets_are_few_and_at_most_half_too_large():
    assert sorted({bucket(n) for n in range(1, 513)}) == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(n <= bucket(n) <= max(8, 1.5 * n) for n in range(1, 2000))
    assert rows_for(70, 72) == 72
    assert rows_for(70, 512) == 96
    assert [columns_for(n) for n in (1, 64, 65, 130, 1000)] == [64, 64, 96, 192, 1024]


def new_cache(**options):
    sizes = {"group_size": 2, "most_rows": 12, "longest": 200} | options
    return StaticKVCache([LayerShape(1, 4)], torch.device("cpu"), torch.float32, 1000, **sizes)


def step(cache, value):
    """One step of all rows whose new keys and values are `value`."""
    cache.reserve(1)
    cache.begin_step()
    rows = cache.num_computed
    cache.attend_decode(
        0, torch.ones(rows, 2, 4), *(torch.full((rows, 1, 4), float(value)) for _ in range(2)), ScoreRule(1.0)
    )
    cache.end_step()
    cache.advance(1)


def seen_by(cache, row):
    """The values of the keys that a row sees, in order."""
    return cache.suffix[0][0, row, 0, cache.suffix_bias[row] == 0, 0].tolist()


def test_buffers_stay_until_they_are_full_and_keep_what_is_seen_when_they_grow():
    cache = new_cache()
    cache.add_prompts([3])
    cache.add_rows(2)
    cache.set_row_owners([0, 0])
    slab, layout = cache.suffix[0].data_ptr(), cache.layout
    for t in range(64):
        step(cache, t)
    assert (cache.suffix[0].data_ptr(), cache.layout) == (slab, layout)
    for t in range(64, 100):
        step(cache, t)
    assert cache.layout != layout
    assert cache.suffix_bias.shape[1] == 128
    assert seen_by(cache, 0) == seen_by(cache, 1) == list(range(100))
    assert int(cache.now) == cache.step_column == 100
    assert cache.first.tolist()[:3] == [0, 0, NEVER]


def test_columns_that_no_row_sees_any_more_are_used_again():
    """Rows that follow each other need no more columns than the oldest one has tokens."""
    cache = new_cache()
    cache.add_prompts([3])
    cache.add_rows(2)
    cache.set_row_owners([0, 0])
    for t in range(40):
        step(cache, t)
    cache.drop_rows([0], [1], 1)
    cache.add_rows(1)
    cache.set_row_owners([0, 0])
    for t in range(40, 400):
        step(cache, t)
        if t % 40 == 0:  # the elder of the two rows makes place for a new one
            cache.drop_rows([0], [1], 1)
            cache.add_rows(1)
            cache.set_row_owners([0, 0])
    assert cache.suffix_bias.shape[1] <= 128
    assert seen_by(cache, 0) == list(range(321, 400))
    assert seen_by(cache, 1) == list(range(361, 400))
    assert cache.first[:2].tolist() == cache.starts


def test_the_cache_never_grows_beyond_what_its_oldest_row_can_need():
    cache = new_cache(longest=100)
    cache.add_prompts([1])
    cache.add_rows(1)
    cache.set_row_owners([0])
    for t in range(100):
        step(cache, t)
    assert cache.suffix_bias.shape[1] <= cache.most_columns == 192


def test_prompts_keep_their_keys_when_others_come_and_go():
    cache = new_cache()
    slots = cache.add_prompts([3, 5])
    cache.prefix[0][:, slots.start] = 1.0
    cache.prefix[0][:, slots.stop - 1] = 2.0
    layout = cache.layout
    cache.drop_prompts([1])
    assert cache.lengths.tolist() == [5, 0]
    assert list(cache.add_prompts([7])) == [1]
    assert cache.layout == layout  # in the place of the one that went
    assert cache.lengths.tolist() == [5, 7]
    assert cache.prefix[0][0, 0, 0, 0, 0] == 2.0
    assert (cache.prefix_bias == HIDDEN).sum(1).tolist() == [27, 25]
    cache.add_prompts([40])
    assert cache.layout != layout
    assert cache.prefix[0].shape[1:4] == (3, 1, 64)
    assert cache.prefix[0][0, 0, 0, 0, 0] == 2.0


def test_cuda_graphs_are_refused_without_cuda_by_their_name(tokenizer, monkeypatch):
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"cuda_graphs=True needs a model on a CUDA device, but this one is on cpu"):
        NativeSampler(model, tokenizer, cuda_graphs=True)
    monkeypatch.setenv("COVEY_CUDA_GRAPHS", "1")
    with pytest.raises(ConfigError, match=r"COVEY_CUDA_GRAPHS=1 needs a model on a CUDA device"):
        NativeSampler(model, tokenizer)
    assert not NativeSampler(model, tokenizer, cuda_graphs=False).is_static
    monkeypatch.setenv("COVEY_CUDA_GRAPHS", "yes")
    with pytest.raises(ConfigError, match="give 1 to decode with CUDA graphs, 0 to decode without"):
        NativeSampler(model, tokenizer)
    monkeypatch.setenv("COVEY_CUDA_GRAPHS", "0")
    assert not NativeSampler(model, tokenizer).static.captures


def test_other_kernels_are_refused_by_name(tokenizer):
    with pytest.raises(ConfigError, match="take auto, torch, triton or compiled"):
        NativeSampler(tiny_model(), tokenizer, attention="flash")
