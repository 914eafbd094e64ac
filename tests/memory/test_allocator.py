"""The block allocator's contract, rule by rule."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_systems_cookbook.memory import BlockAllocator, OutOfBlocks


def state(allocator):
    return list(allocator._free), list(allocator._refcounts)


def test_blocks_come_first_in_first_out():
    allocator = BlockAllocator(3)
    a, b = allocator.allocate(2)
    allocator.free(b)
    allocator.free(a)
    assert allocator.allocate(3) == [2, b, a]


def test_alloc_on_an_empty_pool_says_needed_and_free():
    allocator = BlockAllocator(1)
    allocator.alloc()
    with pytest.raises(OutOfBlocks, match="needed 1 block, 0 free") as error:
        allocator.alloc()
    assert (error.value.needed, error.value.free) == (1, 0)


def test_failed_allocate_takes_nothing():
    allocator = BlockAllocator(4)
    allocator.alloc()
    before = state(allocator)
    with pytest.raises(OutOfBlocks) as error:
        allocator.allocate(4)
    assert (error.value.needed, error.value.free) == (4, 3)
    assert state(allocator) == before


def test_allocate_of_zero_blocks_is_an_empty_list():
    allocator = BlockAllocator(1)
    assert allocator.allocate(0) == []
    assert allocator.free_blocks == 1


def test_out_of_blocks_survives_pickling():
    error = pickle.loads(pickle.dumps(OutOfBlocks(3, 1)))
    assert (error.needed, error.free, str(error)) == (
        3,
        1,
        "needed 3 blocks, 1 free",
    )


@pytest.mark.parametrize("action", ["free", "incref", "refcount"])
@pytest.mark.parametrize("block_id", [-1, 4, 10**12])
def test_id_out_of_range_raises_and_changes_nothing(action, block_id):
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    before = state(allocator)
    with pytest.raises(ValueError, match=f"block {block_id} is outside"):
        getattr(allocator, action)(block_id)
    assert state(allocator) == before


@pytest.mark.parametrize("action", ["free", "incref"])
def test_misuse_of_a_free_block_raises_and_changes_nothing(action):
    allocator = BlockAllocator(2)
    block_id = allocator.alloc()
    allocator.free(block_id)
    before = state(allocator)
    with pytest.raises(ValueError, match=f"block {block_id} is free"):
        getattr(allocator, action)(block_id)
    assert state(allocator) == before


@pytest.mark.parametrize(
    ("num_blocks", "block_size"), [(0, 16), (-1, 16), (1, 0), (1, -3)]
)
def test_impossible_sizes_are_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="must be >= 1"):
        BlockAllocator(num_blocks, block_size)


def test_negative_counts_are_refused():
    allocator = BlockAllocator(2)
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        allocator.allocate(-1)
    with pytest.raises(ValueError, match="num_tokens must be >= 0, got -1"):
        allocator.blocks_needed(-1)


@given(st.integers(0, 10**9), st.integers(1, 512))
def test_blocks_needed_is_the_smallest_number_that_holds(tokens, block_size):
    needed = BlockAllocator(1, block_size).blocks_needed(tokens)
    assert (needed - 1) * block_size < tokens <= needed * block_size


def corrupt_lost(allocator):
    allocator._free.popleft()


def corrupt_twice_free(allocator):
    allocator._free.append(allocator._free[0])


def corrupt_both(allocator):
    allocator._refcounts[allocator._free[0]] = 1


def corrupt_negative(allocator):
    allocator._refcounts[allocator.alloc()] = -1


@pytest.mark.parametrize(
    "corrupt",
    [corrupt_lost, corrupt_twice_free, corrupt_both, corrupt_negative],
)
def test_assert_consistent_names_a_corrupt_block(corrupt):
    allocator = BlockAllocator(4)
    allocator.assert_consistent()
    corrupt(allocator)
    with pytest.raises(AssertionError, match="block 0: "):
        allocator.assert_consistent()


def test_a_block_with_two_owners_is_free_when_both_have_gone():
    allocator = BlockAllocator(2)
    block_id = allocator.alloc()
    allocator.incref(block_id)
    allocator.free(block_id)
    assert (allocator.refcount(block_id), allocator.free_blocks) == (1, 1)
    allocator.free(block_id)
    assert (allocator.refcount(block_id), allocator.free_blocks) == (0, 2)


def test_every_block_starts_with_one_owner():
    one_by_one, at_once = BlockAllocator(9), BlockAllocator(9)
    assert [one_by_one.alloc() for _ in range(9)] == at_once.allocate(9)
    for allocator in (one_by_one, at_once):
        assert [allocator.refcount(b) for b in range(9)] == [1] * 9


@pytest.mark.parametrize("n", [1.0, 2.5, float("nan")])
def test_counts_that_are_no_integers_are_refused(n):
    allocator = BlockAllocator(4)
    before = state(allocator)
    for call in (allocator.allocate, allocator.blocks_needed, BlockAllocator):
        with pytest.raises(TypeError, match=f"must be an integer, got {n}"):
            call(n)
    assert state(allocator) == before


@pytest.mark.parametrize("action", ["free", "incref", "refcount"])
@pytest.mark.parametrize("block_id", [1.0, float("nan")])
def test_ids_that_are_no_integers_are_refused(action, block_id):
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    before = state(allocator)
    with pytest.raises((TypeError, ValueError)):
        getattr(allocator, action)(block_id)
    assert state(allocator) == before


def test_narrow_integers_of_numpy_do_not_overflow():
    allocator = BlockAllocator(np.uint8(255), np.uint8(16))
    assert allocator.blocks_needed(np.uint8(200)) == 13
    assert allocator.blocks_needed(np.int8(127)) == 8
    assert len(allocator.allocate(np.uint8(255))) == 255
    assert allocator.num_blocks * allocator.block_size == 4080


@pytest.mark.parametrize("foreign", [-1, 4, 10**12])
def test_assert_consistent_names_an_id_that_is_no_block(foreign):
    allocator = BlockAllocator(4)
    allocator._free.append(foreign)
    with pytest.raises(AssertionError, match=rf"free list: \[{foreign}\]"):
        allocator.assert_consistent()
