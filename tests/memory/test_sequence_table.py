"""Block tables: growth, truncation, forks, and what a refusal leaves."""

import numpy as np
import pytest

from llm_systems_cookbook.memory import (
    BlockAllocator,
    BlockCopy,
    OutOfBlocks,
    SequenceTable,
    fork_sequence,
)


def snapshot(allocator, *tables):
    return (
        list(allocator._free),
        list(allocator._refcounts),
        [(list(t.block_ids), t.length) for t in tables],
    )


def test_figure_6_of_the_paper_uses_blocks_7_1_then_3():
    allocator = BlockAllocator(8, block_size=4)
    for block_id in allocator.allocate(8) and [7, 1, 3, 0, 2, 4, 5, 6]:
        allocator.free(block_id)
    table = SequenceTable(4)
    table.extend(allocator, 7)
    assert table.block_ids == [7, 1]
    assert table.append(allocator) is None
    assert table.block_ids == [7, 1]
    assert table.append(allocator) is None
    assert table.block_ids == [7, 1, 3]
    assert table.translate(8) == (3, 0)
    assert table.slot(6) == 1 * 4 + 2


def test_translate_outside_the_sequence_raises_index_error():
    table = SequenceTable(4, [2, 0], 5)
    assert table.translate(4) == (0, 0)
    for position in (-1, 5, 8):
        with pytest.raises(IndexError, match=rf"position {position} is"):
            table.translate(position)
        with pytest.raises(IndexError):
            table.slot(position)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_growth_takes_a_block_exactly_when_the_table_is_full(block_size):
    allocator = BlockAllocator(50, block_size)
    table = SequenceTable(block_size)
    for length in range(1, 50):
        table.append(allocator)
        assert len(table.block_ids) == allocator.blocks_needed(length)
        assert allocator.used_blocks == len(table.block_ids)


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_outside_the_sequence_is_refused(length):
    allocator = BlockAllocator(4, 3)
    table = SequenceTable(3)
    table.extend(allocator, 5)
    before = snapshot(allocator, table)
    with pytest.raises(ValueError, match=r"outside \[0, 5\]"):
        table.truncate(allocator, length)
    assert snapshot(allocator, table) == before


def test_free_leaves_an_empty_table_and_may_be_repeated():
    allocator = BlockAllocator(4, 3)
    table = SequenceTable(3)
    table.extend(allocator, 5)
    table.free(allocator)
    table.free(allocator)
    assert (table.block_ids, table.length) == ([], 0)
    assert allocator.free_blocks == 4


@pytest.mark.parametrize(
    ("block_size", "block_ids", "length"),
    [(0, [], 0), (4, [], -1), (4, [], 1), (4, [0, 1], 4), (4, [0], 5)],
)
def test_a_table_that_cannot_be_is_refused(block_size, block_ids, length):
    with pytest.raises(ValueError, match=r"must be >=|tokens need"):
        SequenceTable(block_size, block_ids, length)


def test_a_table_copies_the_ids_it_is_given():
    ids = [3, 1]
    table = SequenceTable(4, ids, 8)
    ids[0] = 99
    assert table.block_ids == [3, 1]


def test_negative_extend_is_refused():
    allocator = BlockAllocator(4, 3)
    table = SequenceTable(3)
    with pytest.raises(ValueError, match="n must be >= 0, got -2"):
        table.extend(allocator, -2)
    assert allocator.free_blocks == 4


def test_extend_with_some_blocks_but_too_few_takes_none():
    allocator = BlockAllocator(3, 2)
    table = SequenceTable(2)
    table.extend(allocator, 2)
    before = snapshot(allocator, table)
    with pytest.raises(OutOfBlocks) as error:
        table.extend(allocator, 5)
    assert (error.value.needed, error.value.free) == (3, 2)
    assert snapshot(allocator, table) == before


@pytest.fixture
def forked():
    allocator = BlockAllocator(4, block_size=4)
    parent = SequenceTable(4)
    parent.extend(allocator, 6)
    return allocator, parent, fork_sequence(parent, allocator)


def test_fork_shares_every_block_and_takes_none(forked):
    allocator, parent, child = forked
    assert child.block_ids == parent.block_ids
    assert child.block_ids is not parent.block_ids
    assert (child.length, child.block_size) == (6, 4)
    assert allocator.used_blocks == 2
    assert [allocator.refcount(b) for b in child.block_ids] == [2, 2]


@pytest.mark.parametrize("grow", ["append", "extend"])
def test_figure_8_first_writer_copies_and_last_writes_in_place(forked, grow):
    allocator, parent, child = forked
    tail = parent.block_ids[-1]

    def write(table):
        if grow == "append":
            return table.append(allocator)
        return (table.extend(allocator, 1) or [None])[0]

    copy = write(child)
    assert copy == BlockCopy(source=tail, destination=child.block_ids[-1])
    assert copy.destination not in parent.block_ids
    assert allocator.refcount(tail) == 1
    assert write(parent) is None
    assert parent.block_ids[-1] == tail


def test_extend_over_a_boundary_copies_the_shared_tail_alone(forked):
    allocator, parent, child = forked
    copies = child.extend(allocator, 5)
    assert copies == [BlockCopy(parent.block_ids[1], child.block_ids[1])]
    assert child.block_ids[0] == parent.block_ids[0]
    assert len(child.block_ids) == 3
    assert allocator.free_blocks == 0


def test_a_full_shared_tail_is_never_copied():
    allocator = BlockAllocator(4, block_size=4)
    parent = SequenceTable(4)
    parent.extend(allocator, 8)
    child = fork_sequence(parent, allocator)
    assert child.append(allocator) is None
    assert child.block_ids[:2] == parent.block_ids


def test_truncated_into_a_shared_block_the_next_append_copies(forked):
    allocator, parent, child = forked
    child.truncate(allocator, 3)
    assert allocator.refcount(parent.block_ids[1]) == 1
    copy = child.append(allocator)
    assert copy == BlockCopy(parent.block_ids[0], child.block_ids[0])


def test_fork_in_a_full_pool_works_and_refused_writes_change_nothing():
    allocator = BlockAllocator(2, block_size=4)
    parent = SequenceTable(4)
    parent.extend(allocator, 6)
    child = fork_sequence(parent, allocator)
    before = snapshot(allocator, parent, child)
    with pytest.raises(OutOfBlocks):
        child.append(allocator)
    with pytest.raises(OutOfBlocks):
        child.extend(allocator, 1)
    assert snapshot(allocator, parent, child) == before
    parent.free(allocator)
    assert child.append(allocator) is None


def test_extend_with_room_only_for_the_copy_takes_nothing(forked):
    allocator, parent, child = forked
    allocator.alloc()  # one block is left: enough for the copy alone
    before = snapshot(allocator, parent, child)
    with pytest.raises(OutOfBlocks) as error:
        child.extend(allocator, 3)
    assert (error.value.needed, error.value.free) == (2, 1)
    assert snapshot(allocator, parent, child) == before


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_fork_of_a_table_with_a_freed_block_changes_nothing(lost):
    allocator = BlockAllocator(4, block_size=2)
    parent = SequenceTable(2)
    parent.extend(allocator, 6)
    allocator.free(parent.block_ids[lost])
    before = snapshot(allocator, parent)
    with pytest.raises(ValueError, match="is free"):
        fork_sequence(parent, allocator)
    assert snapshot(allocator, parent) == before


# A table that lists a block which somebody else gave back, or lists one twice.


def stolen_block(lost, length=6):
    allocator = BlockAllocator(4, block_size=2)
    table = SequenceTable(2)
    table.extend(allocator, length)
    allocator.free(table.block_ids[lost])
    return allocator, table


def doubled_block():
    allocator = BlockAllocator(4, block_size=2)
    table = SequenceTable(2)
    table.extend(allocator, 6)
    table.block_ids[0] = table.block_ids[2]
    return allocator, table


def foreign_block():
    allocator = BlockAllocator(4, block_size=2)
    table = SequenceTable(2)
    table.extend(allocator, 6)
    table.block_ids[0] = 99
    return allocator, table


@pytest.mark.parametrize(
    ("damaged", "complaint"),
    [
        (lambda: stolen_block(0), "block 0 has 0 owners, needs 1"),
        (lambda: stolen_block(1), "block 1 has 0 owners, needs 1"),
        (lambda: stolen_block(2), "block 2 has 0 owners, needs 1"),
        (doubled_block, "block 2 has 1 owners, needs 2"),
        (foreign_block, "block 99 is outside"),
    ],
)
def test_giving_back_blocks_without_an_owner_changes_nothing(
    damaged, complaint
):
    allocator, table = damaged()
    before = snapshot(allocator, table)
    with pytest.raises(ValueError, match=complaint):
        table.free(allocator)
    assert snapshot(allocator, table) == before


@pytest.mark.parametrize("lost", [1, 2])
def test_truncate_over_a_lost_block_changes_nothing(lost):
    allocator, table = stolen_block(lost)
    before = snapshot(allocator, table)
    with pytest.raises(ValueError, match=f"block {lost} has 0 owners"):
        table.truncate(allocator, 1)
    assert snapshot(allocator, table) == before


def test_truncate_looks_only_at_the_blocks_it_gives_back():
    allocator, table = stolen_block(0)
    table.truncate(allocator, 2)
    assert (table.block_ids, table.length) == ([0], 2)
    assert allocator.used_blocks == 0


@pytest.mark.parametrize("grow", ["append", "extend"])
@pytest.mark.parametrize("free_blocks", [True, False])
def test_growth_into_a_tail_without_an_owner_changes_nothing(
    grow, free_blocks
):
    allocator, table = stolen_block(2, length=5)
    if not free_blocks:
        allocator.allocate(allocator.free_blocks - 1)
    before = snapshot(allocator, table)
    arguments = () if grow == "append" else (1,)
    with pytest.raises(ValueError, match="block 2 has 0 owners"):
        getattr(table, grow)(allocator, *arguments)
    assert snapshot(allocator, table) == before


@pytest.mark.parametrize("length", [3, 9])
def test_fork_of_a_table_of_the_wrong_size_raises_no_count(length):
    allocator = BlockAllocator(4, block_size=2)
    parent = SequenceTable(2)
    parent.extend(allocator, 6)
    parent.length = length
    before = snapshot(allocator, parent)
    with pytest.raises(ValueError, match="tokens need"):
        fork_sequence(parent, allocator)
    assert snapshot(allocator, parent) == before


@pytest.mark.parametrize("n", [1.0, 1.5, float("nan")])
def test_counts_that_are_no_integers_are_refused(n):
    allocator = BlockAllocator(4, block_size=2)
    table = SequenceTable(2)
    table.extend(allocator, 5)
    before = snapshot(allocator, table)
    for call in (
        lambda: table.extend(allocator, n),
        lambda: table.truncate(allocator, n),
        lambda: SequenceTable(n),
        lambda: SequenceTable(2, [0], n),
        lambda: SequenceTable(2, [n], 2),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    with pytest.raises((TypeError, IndexError)):
        table.translate(n)
    assert snapshot(allocator, table) == before


def test_narrow_integers_of_numpy_do_not_overflow():
    allocator = BlockAllocator(300, block_size=2)
    table = SequenceTable(np.uint8(2), np.array([], dtype=np.uint8))
    for n in (255, 255):
        table.extend(allocator, np.uint8(n))
    assert (table.length, len(table.block_ids)) == (510, 255)
    table.truncate(allocator, np.uint8(201))
    assert (table.length, len(table.block_ids)) == (201, 101)
    for _ in range(3):
        table.append(allocator)
    assert table.length == 204
    wide = SequenceTable(16, np.array([200, 7], dtype=np.uint8), np.uint8(32))
    assert wide.slot(np.uint8(3)) == 200 * 16 + 3
    assert SequenceTable(300, [1], 200).slot(np.uint8(199)) == 499


def test_a_block_freed_by_a_narrow_id_gives_wide_slots():
    allocator = BlockAllocator(200, block_size=16)
    for block_id in np.array(allocator.allocate(200), dtype=np.uint8):
        allocator.free(block_id)
    table = SequenceTable(16)
    table.extend(allocator, 200 * 16)
    assert table.slot(200 * 16 - 1) == 200 * 16 - 1
