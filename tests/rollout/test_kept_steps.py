"""Captured decode steps that outlive a call of `sample`: kept while they are valid and memory allows, never replayed on other tensors."""

import weakref
from typing import ClassVar

import pytest
import torch
from plain_sampling import collect, ids_of
from static_runs import PROMPTS, Recording, keeping_sampler, logprobs_of, record, sampler_of, writer

from covey.process.device import PeakBytes
from covey.process.memory import release
from covey.rollout import SamplingParams, cuda_graphs, engine, static_buffers
from covey.rollout.cuda_graphs import Captured
from covey.rollout.forward import ModulesForward
from kit import tiny_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


class Noted(Recording):
    """Recordings of which `held` has weak references."""

    held: ClassVar[list] = []

    def of(self, step):
        self.held.append(weakref.ref(self))
        return super().of(step)


@pytest.mark.parametrize("reason", ["memory ran out", "too large to keep"])
def test_what_a_call_has_captured_goes_when_its_memory_is_needed(tokenizer, reason, monkeypatch):
    monkeypatch.setattr(Noted, "held", [])
    sampler = keeping_sampler(writer(), tokenizer, lambda step: Noted().of(step))
    if reason == "too large to keep":
        monkeypatch.setattr(static_buffers, "device_memory", lambda device: 16 * 1024)
    collect(sampler, PROMPTS[:2], 2, SamplingParams(max_tokens=20, seed=7))
    if reason == "memory ran out":
        assert all(reference() is not None for reference in Noted.held)
        release()
    assert Noted.held
    assert not [reference for reference in Noted.held if reference() is not None]
    if reason == "memory ran out":
        captured = len(Noted.held)
        collect(sampler, PROMPTS[:2], 2, SamplingParams(max_tokens=20, seed=7))
        assert len(Noted.held) == 2 * captured  # it still captures, but keeps nothing
        assert not [reference for reference in Noted.held if reference() is not None]


def test_steps_are_captured_once_for_several_rollouts_and_again_when_a_buffer_grows(tokenizer):
    """Weights that change in place are those of the next replay, and completions are those of a sampler without a past."""
    torch.manual_seed(0)
    model, taken = writer(), []
    model.lm_head.bias.data[2] = -1e4  # no completion ends early, so the sizes come back
    sampler = keeping_sampler(model, tokenizer, lambda step: taken.append(1) or record(step))
    every = []
    for seed in range(3):
        params = SamplingParams(max_tokens=16, seed=seed, temperature=0)
        if seed:
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.02 * torch.randn_like(weight)
            sampler.load(model, seed)
        groups = collect(sampler, PROMPTS[:3], 2, params)
        fresh = collect(sampler_of(model, tokenizer), PROMPTS[:3], 2, params)
        assert ids_of(groups) == ids_of(fresh)
        assert torch.equal(logprobs_of(groups), logprobs_of(fresh))
        every.append((len(taken), ids_of(groups)))
    counts, written = zip(*every, strict=True)
    assert counts[0] == counts[1] == counts[2] > 0
    assert written[0] != written[1] != written[2]
    longer = SamplingParams(max_tokens=60, seed=5)
    groups = collect(sampler, PROMPTS[:3], 2, longer)
    assert len(taken) > counts[2]
    fresh = collect(sampler_of(model, tokenizer), PROMPTS[:3], 2, longer)
    assert ids_of(groups) == ids_of(fresh)
    assert torch.equal(logprobs_of(groups), logprobs_of(fresh))


@pytest.mark.parametrize("free_after_learning, is_kept", [(120_000, True), (80_000, False)])
def test_large_buffers_are_kept_where_the_learner_has_shown_that_it_fits_beside(
    free_after_learning, is_kept, tokenizer, monkeypatch
):
    """A device of 1 MB in bytes: learning takes 600,000, and a tenth has to stay free beside."""
    torch.manual_seed(0)
    model, taken = writer(), []
    model.lm_head.bias.data[2] = -1e4  # no completion ends early, so the sizes come back
    sampler = keeping_sampler(model, tokenizer, lambda step: taken.append(1) or record(step))
    monkeypatch.setattr(static_buffers, "device_memory", lambda device: 1_000_000)
    monkeypatch.setattr(static_buffers, "IDLE_SHARE", 0.001)
    monkeypatch.setattr(static_buffers, "free_on", lambda device: 600_000 + free_after_learning)
    monkeypatch.setattr(static_buffers.PeakBytes, "read", lambda peak: 600_000)
    counts, places = [], []
    for version in range(4):
        sampler.load(model, version)
        collect(sampler, PROMPTS[:3], 2, SamplingParams(max_tokens=40, seed=version, temperature=0))
        counts.append(len(taken))
        kept = sampler.static.idle
        places.append(kept and {name: slab.data_ptr() for name, slab in kept.buffers._slabs.items()})
    assert places[0] is None, "nothing has been learned yet"
    if is_kept:
        assert counts[1] > counts[0]
        assert counts[1] == counts[2] == counts[3], "the same graphs"
        assert places[1] == places[2] == places[3], "at the same addresses"
    else:
        assert places == [None] * 4
        assert counts == [counts[0] * (1 + version) for version in range(4)]


class Counter:
    """PyTorch's counter of a device: the bytes that tensors hold, and the most since it was reset. A stand-in for CUDA's."""

    def __init__(self, monkeypatch):
        self.held = self.highest = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: self.highest)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda index: setattr(self, "highest", self.held))
        monkeypatch.setattr(static_buffers, "held_by_this_process", lambda device: self.held)

    def use(self, size):
        """Allocate so many bytes, and free them."""
        self.highest = max(self.highest, self.held + size)


def test_each_reader_of_the_peak_has_its_own_since_its_own_moment(monkeypatch):
    counter, phase, one, two = Counter(monkeypatch), PeakBytes(), PeakBytes(torch.device("cuda")), PeakBytes()
    elsewhere = PeakBytes(torch.device("cpu"))
    counter.use(500)
    assert one.restart() == 500
    counter.use(300)
    assert two.restart() == 500, "it began earlier"
    counter.use(200)
    assert (one.read(), two.read(), phase.restart()) == (300, 200, 500)
    assert (one.read(), two.read(), phase.read(), elsewhere.read()) == (300, 200, 0, 0)


def test_samplers_that_take_turns_measure_the_learner_each_for_itself(monkeypatch):
    """Two adapters on one GPU: the second one's call ends between the first one's update and its next call."""
    counter = Counter(monkeypatch)
    first, second = (static_buffers.MemoryBetweenCalls(torch.device("cuda")) for _ in range(2))
    counter.held = 100
    first.end_call(0)
    counter.use(600)  # the first one's update
    second.begin_call(0)
    second.end_call(0)
    counter.use(50)  # the second one's update
    first.begin_call(1)
    second.begin_call(1)
    assert (first._taken, second._taken) == (600, 50)


@pytest.mark.slow
def test_a_captured_step_is_not_replayed_with_other_weights_parameters_or_adapters(tokenizer):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        writer("gemma2"), peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
    )
    taken = []
    sampler = keeping_sampler(model, tokenizer, lambda step: taken.append(1) or record(step))
    assert isinstance(sampler.forward, ModulesForward)

    def check(params, is_new):
        before = len(taken)
        groups = collect(sampler, PROMPTS[:2], 2, params)
        assert (len(taken) > before) == is_new
        fresh = collect(sampler_of(model, tokenizer), PROMPTS[:2], 2, params)
        assert ids_of(groups) == ids_of(fresh)
        assert torch.equal(logprobs_of(groups), logprobs_of(fresh))

    params = SamplingParams(max_tokens=12, seed=7)
    check(params, True)
    check(params, False)
    check(SamplingParams(max_tokens=12, seed=7, temperature=0.5), True)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.scaling["default"] *= 3
    check(params, True)
    with model.disable_adapter():
        check(params, True)
    layer.base_layer.weight.data = layer.base_layer.weight.data * 2  # moved, not changed in place
    check(params, True)


def test_calls_that_overlap_have_buffers_of_their_own(tokenizer):
    model, params = writer(), SamplingParams(max_tokens=30, seed=7)
    sampler = keeping_sampler(model, tokenizer)
    expected = [ids_of(collect(sampler, prompts, 2, params)) for prompts in (PROMPTS[:4], PROMPTS[4:8])]
    outer = sampler.sample(PROMPTS[:4], 2, params)
    groups = [next(outer)]
    inner = list(sampler.sample(PROMPTS[4:8], 2, params))
    groups += outer
    order = lambda found, prompts: sorted(found, key=lambda group: prompts.index(list(group.prompt.token_ids)))
    assert ids_of(order(groups, PROMPTS)) == expected[0]
    assert ids_of(order(inner, PROMPTS)) == expected[1]


def test_the_cache_budget_counts_kept_buffers_as_free_but_not_the_pool_of_captures(tokenizer, monkeypatch):
    sampler = keeping_sampler(writer(), tokenizer, cache_fraction=0.5)
    monkeypatch.setattr(engine, "free_on", lambda device: 1_000_000)
    assert sampler.budget() == 500_000
    collect(sampler, PROMPTS[:2], 2, SamplingParams(max_tokens=8, seed=7))
    held = sampler.static.idle.buffers.nbytes
    assert sampler.budget() == (1_000_000 + held) // 2
    monkeypatch.setattr(Captured, "nbytes", 300_000)
    assert sampler.budget() == (1_000_000 + held - 300_000) // 2


def test_captures_of_shapes_that_never_come_back_are_bounded(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MOST", 4)
    steps = Captured(record)
    for key in range(20):
        steps.run(key, 0, lambda: None)
        assert len(steps.replays) <= 5


def test_a_model_on_another_device_has_its_buffers_there(tokenizer, monkeypatch):
    """The model that a sampler loads may be elsewhere than the one it was made with."""
    sampler, meta = sampler_of(writer(), tokenizer), torch.device("meta")
    choose = engine.best_forward

    def moved(*arguments):
        forward = choose(*arguments)
        forward.device = meta
        return forward

    monkeypatch.setattr(engine, "best_forward", moved)
    monkeypatch.setattr(engine, "verified_kernels", lambda *arguments: None)
    sampler.load(writer(), 1)
    assert sampler.static.begin_call(1).buffers.device == meta
