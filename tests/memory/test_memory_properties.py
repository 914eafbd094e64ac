"""Random operations with real contents, against models too plain to be wrong.

A sequence's model is a Python list of what was written to it. After every
operation each table must read back its list, freed blocks are poisoned, and
the allocator's counts must be those that the tables imply.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from llm_systems_cookbook.memory import (
    BlockAllocator,
    BuddyRegions,
    FirstFitRegions,
    NoFreeRegion,
    OutOfBlocks,
    SequenceTable,
    fork_sequence,
)

POISON = "poison"
# A fixed run: the same examples each time, on every machine.
RUN = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, deadline=None
)
sequences = st.integers(0, 3)


class Tables(RuleBasedStateMachine):
    """Tables, an allocator and a pool of contents."""

    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.pool = [[POISON] * block_size for _ in range(num_blocks)]
        self.tables = []
        self.model = []
        self.owned = []  # block ids held directly, once per reference
        self.written = 0

    def pick(self, i):
        return i % len(self.tables)

    def snapshot(self):
        return (
            list(self.allocator._free),
            list(self.allocator._refcounts),
            [(list(t.block_ids), t.length) for t in self.tables],
        )

    def write(self, i, start):
        for position in range(start, self.tables[i].length):
            self.written += 1
            block_id, offset = self.tables[i].translate(position)
            self.pool[block_id][offset] = self.written
            self.model[i].append(self.written)

    def make(self, copies):
        for source, destination in copies:
            self.pool[destination] = list(self.pool[source])

    def blocks_short(self, i, n):
        """Return how many blocks too few there are to grow by n tokens."""
        table = self.tables[i]
        needed = self.allocator.blocks_needed(table.length + n)
        needed -= len(table.block_ids)
        tail_is_partly_filled = table.length < table.capacity
        if n and tail_is_partly_filled:
            owners = sum(
                table.block_ids[-1] in t.block_ids for t in self.tables
            )
            needed += owners > 1
        return needed - self.allocator.free_blocks

    @precondition(lambda self: len(self.tables) < 4)
    @rule()
    def new(self):
        self.tables.append(SequenceTable(self.allocator.block_size))
        self.model.append([])

    @precondition(lambda self: self.tables)
    @rule(i=sequences)
    def append(self, i):
        i = self.pick(i)
        start, before = self.tables[i].length, self.snapshot()
        if self.blocks_short(i, 1) > 0:
            with pytest.raises(OutOfBlocks):
                self.tables[i].append(self.allocator)
            assert self.snapshot() == before
            return
        copy = self.tables[i].append(self.allocator)
        self.make([copy] if copy else [])
        self.write(i, start)

    @precondition(lambda self: self.tables)
    @rule(i=sequences, n=st.integers(0, 9))
    def extend(self, i, n):
        i = self.pick(i)
        start, before = self.tables[i].length, self.snapshot()
        if self.blocks_short(i, n) > 0:
            with pytest.raises(OutOfBlocks):
                self.tables[i].extend(self.allocator, n)
            assert self.snapshot() == before
            return
        self.make(self.tables[i].extend(self.allocator, n))
        self.write(i, start)

    @precondition(lambda self: self.tables)
    @rule(i=sequences, data=st.data())
    def truncate(self, i, data):
        i = self.pick(i)
        length = data.draw(st.integers(0, self.tables[i].length))
        self.tables[i].truncate(self.allocator, length)
        del self.model[i][length:]

    @precondition(lambda self: 0 < len(self.tables) < 4)
    @rule(i=sequences)
    def fork(self, i):
        i = self.pick(i)
        free = self.allocator.free_blocks
        self.tables.append(fork_sequence(self.tables[i], self.allocator))
        self.model.append(list(self.model[i]))
        assert self.allocator.free_blocks == free

    @precondition(lambda self: self.tables)
    @rule(i=sequences)
    def free(self, i):
        i = self.pick(i)
        self.tables.pop(i).free(self.allocator)
        self.model.pop(i)

    @rule(n=st.integers(0, 3))
    def allocate(self, n):
        before = self.snapshot()
        if n > self.allocator.free_blocks:
            with pytest.raises(OutOfBlocks) as error:
                self.allocator.allocate(n)
            assert (error.value.needed, error.value.free) == (
                n,
                self.allocator.free_blocks,
            )
            assert self.snapshot() == before
            return
        oldest = list(self.allocator._free)[:n]
        assert self.allocator.allocate(n) == oldest
        self.owned += oldest

    @precondition(lambda self: self.owned)
    @rule(i=st.integers(0, 9))
    def incref(self, i):
        block_id = self.owned[i % len(self.owned)]
        self.allocator.incref(block_id)
        self.owned.append(block_id)

    @precondition(lambda self: self.owned)
    @rule(i=st.integers(0, 9))
    def free_a_reference(self, i):
        self.allocator.free(self.owned.pop(i % len(self.owned)))

    @rule(block_id=st.integers(-1, 8))
    def misuse_of_a_free_block_is_refused(self, block_id):
        inside = 0 <= block_id < self.allocator.num_blocks
        if inside and self.allocator.refcount(block_id):
            return
        before = self.snapshot()
        for action in (self.allocator.free, self.allocator.incref):
            with pytest.raises(ValueError, match="block"):
                action(block_id)
        assert self.snapshot() == before

    @invariant()
    def counts_are_those_the_tables_imply(self):
        self.allocator.assert_consistent()
        owners = Counter(b for t in self.tables for b in t.block_ids)
        owners.update(self.owned)
        for block_id in range(self.allocator.num_blocks):
            assert self.allocator.refcount(block_id) == owners[block_id]
            if not owners[block_id]:
                self.pool[block_id] = [POISON] * self.allocator.block_size

    @invariant()
    def every_table_reads_back_what_was_written(self):
        for table, expected in zip(self.tables, self.model, strict=True):
            read = [
                self.pool[block_id][offset]
                for block_id, offset in map(
                    table.translate, range(table.length)
                )
            ]
            assert read == expected

    @invariant()
    def a_table_holds_no_block_too_many(self):
        for table in self.tables:
            needed = self.allocator.blocks_needed(table.length)
            assert len(table.block_ids) == needed

    def teardown(self):
        if not hasattr(self, "tables"):
            return
        for table in self.tables:
            table.free(self.allocator)
        for block_id in self.owned:
            self.allocator.free(block_id)
        self.allocator.assert_consistent()
        assert self.allocator.free_blocks == self.allocator.num_blocks


class Regions(RuleBasedStateMachine):
    """Regions written with their owner's name, slot by slot."""

    kind = None

    @initialize(num_slots=st.integers(1, 40))
    def start(self, num_slots):
        self.regions = self.kind(num_slots)
        self.slots = [None] * num_slots
        self.sizes = {}

    def holes(self):
        """Return the free runs of slots as (start, size)."""
        runs, start = [], None
        for i, owner in enumerate([*self.slots, "end"]):
            if owner is None and start is None:
                start = i
            if owner is not None and start is not None:
                runs.append((start, i - start))
                start = None
        return runs

    def room(self, size):
        return any(hole >= size for _, hole in self.holes())

    @rule(size=st.integers(1, 20))
    def allocate(self, size):
        taken = self.regions.region_size(size)
        assert taken >= size
        before = repr(vars(self.regions))
        if not self.room(taken):
            with pytest.raises(NoFreeRegion) as error:
                self.regions.allocate(size)
            assert error.value.needed == taken
            assert error.value.free == self.slots.count(None)
            assert repr(vars(self.regions)) == before
            return
        start = self.regions.allocate(size)
        assert self.slots[start : start + taken] == [None] * taken
        self.slots[start : start + taken] = [start] * taken
        self.sizes[start] = taken

    @precondition(lambda self: self.sizes)
    @rule(i=st.integers(0, 40))
    def free(self, i):
        start = sorted(self.sizes)[i % len(self.sizes)]
        size = self.sizes.pop(start)
        assert self.slots[start : start + size] == [start] * size
        self.slots[start : start + size] = [None] * size
        self.regions.free(start)

    @rule(start=st.integers(-1, 41))
    def free_of_nothing_is_refused(self, start):
        if start in self.sizes:
            return
        with pytest.raises(ValueError, match=f"slot {start}"):
            self.regions.free(start)

    @rule(size=st.integers(-2, 0))
    def an_empty_region_is_refused(self, size):
        with pytest.raises(ValueError, match="must be >= 1"):
            self.regions.allocate(size)

    @invariant()
    def adds_up(self):
        self.regions.assert_consistent()
        assert self.regions.free_slots == self.slots.count(None)

    def teardown(self):
        if not hasattr(self, "sizes"):
            return
        for start in self.sizes:
            self.regions.free(start)
        self.regions.assert_consistent()
        # Whole again: what an empty pool can hold, it holds now.
        fresh = self.kind(self.regions.num_slots)
        assert self.regions.largest_hole == fresh.largest_hole
        assert self.regions.free_slots == fresh.num_slots


class FirstFit(Regions):
    kind = FirstFitRegions

    def room(self, size):
        holes = self.holes()
        largest = max((hole for _, hole in holes), default=0)
        assert self.regions.largest_hole == largest
        return largest >= size

    @invariant()
    def takes_the_first_hole_that_fits(self):
        assert self.regions._holes == self.holes()


class Buddy(Regions):
    kind = BuddyRegions

    def room(self, size):
        """An aligned run of free slots, of this power of two."""
        n = self.regions.num_slots
        return any(
            self.slots[start : start + size] == [None] * size
            for start in range(0, n - size + 1, size)
        )

    @invariant()
    def regions_are_aligned_powers_of_two(self):
        for start, size in self.sizes.items():
            assert size & (size - 1) == 0
            assert start % size == 0


TestTables = Tables.TestCase
TestTables.settings = RUN
TestFirstFit = FirstFit.TestCase
TestFirstFit.settings = RUN
TestBuddy = Buddy.TestCase
TestBuddy.settings = RUN
