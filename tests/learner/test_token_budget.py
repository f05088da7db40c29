"""On an accelerator a micro-batch is filled up to a number of tokens that memory allows, whatever the batch size is."""

import pytest
import torch
import transformers

from covey import algorithms as alg
from covey.errors import MemoryLimitError
from covey.learner import Policy
from covey.learner.memory_estimate import (
    cache_bytes,
    expect_host_room,
    offloaded_bytes,
    starting_limits,
    starting_tokens,
    update_bytes,
)
from covey.learner.micro_batches import MicroBatcher
from covey.learner.out_of_memory import BatchLimits
from covey.learner.packing import rows_of, tokens_in
from covey.learner.worst_case import groups_of
from covey.process.world import World
from kit import learner_of, tiny_model

GIB = 2**30


def policy_of(**more):
    return Policy(tiny_model(layers=2, hidden=64, **more), pad_id=0)


@pytest.mark.parametrize("free, each, tokens", [(60 * GIB, 2**18, 2**16), (60 * GIB, 2**10, 2**17), (8 * GIB, 2**18, 2**14),
                                                (-GIB, 2**18, 1024)])  # fmt: skip
def test_an_accelerators_limit_is_the_power_of_two_that_fits_in_half_of_its_room(free, each, tokens):
    found = starting_tokens("auto", policy_of(), on_cpu=False, bytes_each=lambda: each, room=lambda: free)
    assert found == tokens


def test_a_limit_from_the_options_is_kept_as_it_is():
    assert starting_tokens(50_000, policy_of(), on_cpu=False) == 50_000
    assert starting_tokens(None, policy_of(), on_cpu=False) is None


def test_gradients_and_the_moments_of_adam_are_set_apart():
    policy = policy_of()
    count = sum(parameter.numel() for parameter in policy.parameters())
    assert update_bytes(policy) == 12 * count
    free = 2 * 2**14 * 2**20 + 6 * count  # half of the gradients and moments fits
    given = {"on_cpu": False, "bytes_each": lambda: float(2**20)}
    two_devices = starting_tokens("auto", policy, room=lambda: free - update_bytes(policy) / 2, **given)
    assert (two_devices, starting_tokens("auto", policy, room=lambda: free - update_bytes(policy), **given)) == (
        2**14,
        2**13,
    )


def test_a_step_of_131000_tokens_takes_five_passes_whatever_the_batch_size_is():
    rows = rows_of(groups_of(256, 256, 512, 8, 1000))
    for batch in (1, 16, 128):
        room = MicroBatcher(starting_limits("auto", batch, 256, on_cpu=False, max_tokens=2**17), lambda: True)
        sizes = [tokens_in(batch, True) for batch in room.batches(rows)]
        assert len(sizes) == 5
        assert max(sizes) <= 2**15


def test_a_group_that_is_longer_than_enough_is_one_pass_where_memory_allows():
    rows = rows_of(groups_of(16, 100, 8192, 8, 1000))
    room = MicroBatcher(starting_limits("auto", 16, 16, on_cpu=False, max_tokens=2**17), lambda: True)
    assert [len(batch) for batch in room.batches(rows)] == [8, 8]


def test_rows_are_bounded_by_the_batch_size_on_a_cpu_and_where_tokens_are_not():
    assert starting_limits("auto", 16, 256, on_cpu=True).max_rows == 16
    assert starting_limits(None, 16, 256, on_cpu=False).max_rows == 16
    assert [starting_limits(option, 16, 256, on_cpu=False).max_rows for option in ("auto", 4096)] == [256, 256]


def test_memory_that_runs_out_halves_the_budget_and_changes_no_gradient(monkeypatch):
    def gradient(most):
        policy = policy_of()
        learner = learner_of(
            policy, torch.optim.SGD(policy.parameters(), lr=1.0), max_completion_length=20, max_rows=32
        )
        learner.micro_batcher.limits.max_tokens = 1024
        measure = policy.measure

        def watched(rows, **options):
            if tokens_in(rows, True) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return measure(rows, **options)

        monkeypatch.setattr(policy, "measure", watched)
        before = torch.cat([p.detach().flatten() for p in policy.parameters()])
        learner.step(groups_of(32, 30, 20, 4, 300), alg.dapo(), 1)
        return before - torch.cat(
            [p.detach().flatten() for p in policy.parameters()]
        ), learner.micro_batcher.limits.max_tokens

    whole, halved = gradient(10**6), gradient(500)
    assert (whole[1], halved[1]) == (1024, 424)
    assert (whole[0] - halved[0]).norm() < 1e-5 * whole[0].norm()


def test_sizes_of_another_kind_of_device_are_not_restored():
    cpu, gpu = (BatchLimits(8, 2048), BatchLimits(256, 2**16, device="cuda"))
    gpu.load_state_dict(cpu.state_dict())
    assert (gpu.max_rows, gpu.max_tokens) == (256, 2**16)
    gpu.load_state_dict(BatchLimits(100, 2**14, device="cuda").state_dict())
    assert (gpu.max_rows, gpu.max_tokens) == (100, 2**14)


def test_shards_that_host_memory_has_no_room_for_are_refused_before_the_start(monkeypatch):
    policy = Policy(tiny_model("qwen2", hidden=16, layers=2), pad_id=0)
    weights = sum(p.nbytes for p in policy.model.parameters())
    assert offloaded_bytes(policy, "adamw_torch", copies=1) == 5 * weights  # weights, reference, gradients, two moments
    assert offloaded_bytes(policy, "sgd") == 2 * weights
    embeddings = policy.model.get_input_embeddings().weight.nbytes
    assert offloaded_bytes(policy, "adamw_8bit") == 2 * weights + (weights - embeddings) // 2 + 2 * embeddings
    decoder = sum(p.nbytes for p in policy.model.get_decoder().parameters())
    more = offloaded_bytes(policy, "adamw_torch", has_critic=True, teachers=100) - offloaded_bytes(
        policy, "adamw_torch"
    )
    assert more == 4 * decoder + 100  # a separate critic's weights, gradients and two moments
    monkeypatch.setattr("covey.learner.memory_estimate.free_memory", lambda: 3 * weights)
    expect_host_room(3 * weights, World())
    expect_host_room(5 * weights, World(), held=2 * weights)
    with pytest.raises(MemoryLimitError, match="in host memory: .* and .* are free; leave the offload out"):
        expect_host_room(4 * weights, World())


def test_layers_with_a_state_alone_have_no_part_in_the_kv_cache():
    hybrid = transformers.Qwen3NextConfig()
    full = transformers.Qwen3NextConfig(layer_types=["full_attention"] * hybrid.num_hidden_layers)
    share = hybrid.layer_types.count("full_attention") / hybrid.num_hidden_layers
    assert 0 < cache_bytes(hybrid, 100, 2) == share * cache_bytes(full, 100, 2) < cache_bytes(full, 100, 2)
    assert cache_bytes(transformers.MambaConfig(), 100, 2) == 0


def test_layers_with_keys_of_their_own_size_are_counted_one_by_one():
    layers = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.Gemma4TextConfig(**layers, head_dim=256, global_head_dim=512)  # every sixth layer is global
    assert config.layer_types.count("full_attention") == 1
    assert cache_bytes(config, 10, 2) == 10 * 2 * (5 * 2 * 256 + 1 * 2 * 512) * 2
