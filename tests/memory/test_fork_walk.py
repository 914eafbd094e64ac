"""A seeded walk that shares tails often: contents against plain lists.

The stateful test draws few partly filled tails that are shared. This one is
made of them, and says how many it met.
"""

import random
from collections import Counter

import pytest

from llm_systems_cookbook.memory import (
    BlockAllocator,
    OutOfBlocks,
    SequenceTable,
    fork_sequence,
)


class Family:
    """Tables of one pool, its contents, and what each should read."""

    def __init__(self, num_blocks, block_size):
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.pool = [["poison"] * block_size for _ in range(num_blocks)]
        self.tables, self.model = [], []
        self.seen = Counter()

    def tail_is_shared(self, i):
        table = self.tables[i]
        if table.length == table.capacity:
            return False
        tail = table.block_ids[-1]
        return sum(tail in other.block_ids for other in self.tables) > 1

    def grow(self, i, n, token):
        """Append when n is 1, else extend; write and count what happened."""
        table, how = self.tables[i], "append" if n == 1 else "extend"
        shared, start = self.tail_is_shared(i), table.length
        needed = self.allocator.blocks_needed(start + n)
        needed += shared - len(table.block_ids)
        if needed > self.allocator.free_blocks:
            with pytest.raises(OutOfBlocks):
                self.make_room(table, n)
            self.seen[f"refused {how}", shared] += 1
            return
        copies = self.make_room(table, n)
        assert len(copies) == shared
        for source, destination in copies:
            self.pool[destination] = list(self.pool[source])
        self.seen[how, shared] += 1
        for position in range(start, table.length):
            block_id, offset = table.translate(position)
            self.pool[block_id][offset] = token
        self.model[i] += [token] * n

    def make_room(self, table, n):
        if n == 1:
            copy = table.append(self.allocator)
            return [] if copy is None else [copy]
        return table.extend(self.allocator, n)

    def check(self):
        self.allocator.assert_consistent()
        owners = Counter(b for t in self.tables for b in t.block_ids)
        for block_id, row in enumerate(self.pool):
            assert self.allocator.refcount(block_id) == owners[block_id]
            if not owners[block_id]:
                row[:] = ["poison"] * len(row)
        for table, expected in zip(self.tables, self.model, strict=True):
            slots = map(table.translate, range(table.length))
            assert [self.pool[b][o] for b, o in slots] == expected


def walk(family, rng, steps):
    for token in range(steps):
        if not family.tables:
            family.tables.append(SequenceTable(family.allocator.block_size))
            family.model.append([])
        i = rng.randrange(len(family.tables))
        action = rng.choice(["append", "extend", "fork", "truncate", "free"])
        if action in ("append", "extend"):
            n = 1 if action == "append" else rng.randint(2, 6)
            family.grow(i, n, token)
        elif action == "fork" and len(family.tables) < 5:
            child = fork_sequence(family.tables[i], family.allocator)
            family.tables.append(child)
            family.model.append(list(family.model[i]))
        elif action == "truncate":
            length = rng.randint(0, family.tables[i].length)
            family.tables[i].truncate(family.allocator, length)
            del family.model[i][length:]
        elif action == "free" and rng.random() < 0.3:
            family.tables.pop(i).free(family.allocator)
            family.model.pop(i)
        family.check()
    for table in family.tables:
        table.free(family.allocator)
    assert family.allocator.free_blocks == family.allocator.num_blocks


def test_shared_tails_are_copied_and_refused_without_loss():
    seen = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        family = Family(rng.randint(3, 12), rng.randint(2, 5))
        walk(family, rng, steps=400)
        seen += family.seen
    for how in ("append", "extend", "refused append", "refused extend"):
        assert seen[how, True] > 50, f"{how} of a shared tail: too few"
        if how != "refused append":
            assert seen[how, False] > 50
