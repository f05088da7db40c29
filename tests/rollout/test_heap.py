"""Memory outside of torch's allocator: pages for keys and values, what the C library's heap holds empty, what Python collects."""

import gc
import weakref

import pytest
import torch

from covey import memory
from covey.memory import Holes, collecting_new_garbage_only, is_out_of_memory, mapped_zeros

BLOCK = 2**16


class Library:
    """glibc's part of what is asked of it, with this much of the heap empty."""

    def __init__(self, empty):
        self.given_back = 0
        self.mallinfo2 = lambda: memory._Mallinfo2(fordblks=empty)

    def malloc_trim(self, padding):
        self.given_back += 1


@pytest.mark.parametrize(("empty", "times"), [(0, 1), (Holes.FEW, 1), (Holes.FEW + 1, 0)])
def test_holes_are_given_back_where_there_were_none_before(empty, times, monkeypatch):
    library = Library(empty)
    monkeypatch.setattr(memory, "_glibc", lambda: library)
    Holes().give_back()
    assert library.given_back == times


@pytest.mark.skipif(not hasattr(memory._glibc(), "mallinfo2"), reason="this C library does not say what is empty")
def test_what_is_empty_is_what_the_c_library_says():
    library = memory._glibc()
    blocks = [torch.empty(BLOCK // 4) for _ in range(200)]
    kept = blocks[1::2]
    before = memory._empty_bytes(library)
    del blocks
    found = memory._empty_bytes(library)
    assert found - before > 50 * BLOCK, "a hundred blocks between those that are kept"
    assert kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_their_own_are_a_tensor_of_zeros_like_any_other(dtype):
    found = mapped_zeros((2, 3, 5), dtype)
    assert found.shape == (2, 3, 5)
    assert found.dtype == dtype
    assert not found.any()
    found[1] = 2
    assert found.sum() == 30
    assert mapped_zeros((2, 0, 5), dtype).shape == (2, 0, 5)


def test_pages_that_cannot_be_had_are_memory_that_ran_out():
    with pytest.raises(MemoryError) as caught:
        mapped_zeros((2**60,), torch.float32)
    assert is_out_of_memory(caught.value)


class Node:
    """Something that can be part of a cycle, and be referred to weakly."""

    itself = None


def cycle():
    node = Node()
    node.itself = node
    return node


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
