"""Memory outside of torch's allocator: pages for keys and values, what Python collects."""

import gc
import weakref

import pytest
import torch

from covey.kernels import zeros
from covey.process.memory import collecting_new_garbage_only, is_out_of_memory
from faults.small_runs import trainer

pytestmark = pytest.mark.usefixtures("thawed_heap")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_their_own_are_a_tensor_of_zeros_like_any_other(dtype):
    found = zeros((2, 3, 5), dtype)
    assert found.shape == (2, 3, 5)
    assert found.dtype == dtype
    assert not found.any()
    found[1] = 2
    assert found.sum() == 30
    assert zeros((2, 0, 5), dtype).shape == (2, 0, 5)


def test_pages_that_cannot_be_had_are_memory_that_ran_out():
    with pytest.raises(MemoryError) as caught:
        zeros((2**60,), torch.float32)
    assert is_out_of_memory(caught.value)


class Node:
    """Something that can be part of a cycle, and be referred to weakly."""

    itself = None


def cycle():
    node = Node()
    node.itself = node
    return node


@pytest.mark.slow
def test_collections_during_a_run_look_at_what_is_new_alone():
    garbage, old, new = weakref.ref(cycle()), cycle(), None
    alive = weakref.ref(old)
    with collecting_new_garbage_only():
        assert garbage() is None, "what nobody needs any more does not wait for the run's end"
        new, old = weakref.ref(cycle()), None
        gc.collect()
        assert new() is None, "what was made inside is garbage like any other"
        assert alive() is not None, "what was there before is not looked at"
    gc.collect()
    assert alive() is None, "it is looked at again afterwards"


def test_after_the_first_step_collections_no_longer_look_at_what_it_made(tmp_path):
    """It compiles: a full collection over what that leaves behind would take longer than some steps."""
    held, seen, is_alive = [], [], []

    def reward(completions, **columns):
        """Drops what the step before made, and says whether a full collection frees it."""
        seen.extend(weakref.ref(node) for node in held)
        held.clear()
        gc.collect()
        is_alive.append([node() is not None for node in seen])
        held.append(cycle())
        return [float(len(text)) for text in completions]

    trainer(tmp_path, reward_funcs=reward, max_steps=4, save_strategy="no").train()
    assert is_alive == [[], [True], [True, False], [True, False, False]]
    gc.collect()
    assert not [node for node in seen if node() is not None]


@pytest.mark.slow
def test_a_run_within_a_run_leaves_it_to_the_outer_one():
    with collecting_new_garbage_only():
        frozen = gc.get_freeze_count()
        grown = [[] for _ in range(1000)]
        with collecting_new_garbage_only():
            assert gc.get_freeze_count() <= frozen, "what was made since is not frozen (and what was may have gone)"
        assert gc.get_freeze_count() > frozen // 2
        assert len(grown) == 1000
    assert gc.get_freeze_count() < frozen // 2


def test_what_somebody_else_froze_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with collecting_new_garbage_only():
            assert gc.get_freeze_count() <= frozen, "and nothing is added"
        assert gc.get_freeze_count() > frozen // 2
    finally:
        gc.unfreeze()
