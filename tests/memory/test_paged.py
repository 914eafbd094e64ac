"""Paged memory, shared and swapped: who has which block, and when.

The walk at the end moves real numbers by the pairs that memory returns, and
compares them with a model that knows no blocks: a list per request.
"""

import random

import numpy as np
import pytest

from llm_systems_cookbook.memory import (
    BlockAllocator,
    BlockCopy,
    PagedMemory,
    ReservedMemory,
    Usage,
)


def paged(num_blocks=8, block_size=4, host_blocks=0):
    return PagedMemory(
        BlockAllocator(num_blocks, block_size), host_blocks=host_blocks
    )


def snapshot(memory):
    """Return all that a call could change."""
    pools = [memory.allocator, memory.host]
    return (
        [(list(p._free), list(p._refcounts)) for p in pools if p is not None],
        {i: (list(t.block_ids), t.length) for i, t in memory._tables.items()},
        {
            i: (list(t.block_ids), t.length)
            for i, t in memory._host_tables.items()
        },
        dict(memory._finals),
        list(memory._copies.values()),
    )


def refcounts(memory, request_id):
    return [memory.allocator.refcount(b) for b in memory.block_ids(request_id)]


def assert_empty(memory):
    memory.assert_consistent()
    assert memory.request_ids == set()
    assert memory.usage() == Usage(0, 0, 0, memory.capacity)
    assert memory.take_copies() == []
    assert memory.host is None or memory.host.used_blocks == 0


# --- Construction ----------------------------------------------------------


def test_host_blocks_are_counted_and_none_means_no_host():
    assert paged().host is None
    memory = paged(host_blocks=np.int64(3))
    assert (memory.host.num_blocks, memory.host.block_size) == (3, 4)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, "host_blocks must be >= 0, got -1"),
        (1.0, TypeError, r"host_blocks must be an integer, got 1\.0"),
    ],
)
def test_a_bad_number_of_host_blocks_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        paged(host_blocks=value)


# --- Looking ---------------------------------------------------------------


def test_length_and_block_ids_follow_growth():
    memory = paged()
    memory.admit("a", 3)
    assert memory.length("a") == 3
    assert memory.block_ids("a") == [0]
    memory.grow("a", 2)
    assert memory.length("a") == 5
    assert memory.block_ids("a") == [0, 1]
    assert memory.request_ids == {"a"}


@pytest.mark.parametrize("memory", [paged(), ReservedMemory(32, 8)])
def test_an_unknown_request_has_nothing_to_look_at(memory):
    for look in (memory.length, memory.block_ids):
        with pytest.raises(KeyError, match="'b'"):
            look("b")
    assert memory.request_ids == set()


def test_assert_consistent_names_a_block_that_no_table_lists():
    memory = paged()
    memory.admit("a", 3)
    memory.assert_consistent()
    memory.allocator.incref(0)
    with pytest.raises(AssertionError, match="block 0 has 2 references"):
        memory.assert_consistent()


def test_assert_consistent_looks_at_the_host_as_well():
    memory = paged(host_blocks=2)
    memory.assert_consistent()
    memory.host.alloc()
    with pytest.raises(AssertionError, match="block 0 has 1 references"):
        memory.assert_consistent()


# --- Admission with a share kept free --------------------------------------


@pytest.mark.parametrize(
    ("keep_free", "admitted"),
    [(0, True), (1, True), (12, True), (13, False), (16, False)],
)
def test_admission_keeps_whole_blocks_free(keep_free, admitted):
    memory = paged(num_blocks=5)
    memory.admit("a", 1)
    before = snapshot(memory)
    # Four blocks are free, this takes one: 12 slots stay.
    assert memory.admit("b", 4, keep_free=keep_free) is admitted
    assert (snapshot(memory) == before) is not admitted


def test_a_share_to_keep_free_below_zero_is_refused():
    memory = paged()
    before = snapshot(memory)
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        memory.admit("a", 1, keep_free=-1)
    assert snapshot(memory) == before


def test_growth_ignores_what_admission_keeps_free():
    memory = paged(num_blocks=2)
    memory.admit("a", 4, keep_free=4)
    assert not memory.admit("b", 4, keep_free=1)
    assert memory.grow("a")


@pytest.mark.parametrize(
    ("tokens", "samples", "shared", "blocks"),
    [
        (8, 1, 0, 2),
        (8, 3, 0, 6),
        (8, 3, 4, 1 + 3 * 1),
        (9, 3, 7, 1 + 3 * 2),  # a partly filled block is not shared for long
        (9, 3, 8, 2 + 3 * 1),
        (7, 3, 7, 2),  # no sample ever writes
        (7, 3, 99, 2),
    ],
)
def test_shared_tokens_are_counted_once(tokens, samples, shared, blocks):
    assert paged(blocks).fits(tokens, samples, shared)
    if blocks > 1:
        assert not paged(blocks - 1).fits(tokens, samples, shared)


def test_paged_usage_splits_the_tail_by_the_final_length():
    memory = paged(num_blocks=4)
    memory.admit("ends in this block", 5, 6)
    assert memory.usage() == Usage(5, 1, 2, 8)
    memory.release("ends in this block")
    memory.admit("goes on", 5, 60)
    assert memory.usage() == Usage(5, 3, 0, 8)
    memory.release("goes on")
    memory.admit("unknown", 5)
    assert memory.usage() == Usage(5, 3, 0, 8)


def test_paged_growth_is_all_or_nothing():
    memory = paged(num_blocks=2)
    memory.admit("a", 3)
    assert not memory.grow("a", 6)
    assert memory.usage().token_states == 3
    assert memory.grow("a", 5)
    assert not memory.grow("a")
    assert memory.allocator.free_blocks == 0
    assert memory.grow("a", 0)
    memory.release("a")
    assert memory.allocator.free_blocks == 2


def test_narrow_lengths_do_not_overflow_in_pages():
    memory = paged(num_blocks=256, block_size=4)
    assert memory.admit("a", np.uint8(200), np.int16(600))
    assert memory.grow("a", np.uint8(200))
    assert memory.grow("a", np.uint8(1))
    assert memory.usage() == Usage(401, 3, 0, 620)


# --- Forks -----------------------------------------------------------------


def test_a_fork_takes_no_block_and_shares_all():
    memory = paged()
    memory.admit("a", 6)
    free = memory.allocator.free_blocks
    memory.fork("a", "b")
    assert memory.allocator.free_blocks == free
    assert memory.block_ids("b") == memory.block_ids("a")
    assert memory.length("b") == 6
    assert refcounts(memory, "a") == [2, 2]
    memory.assert_consistent()


def test_the_first_writer_copies_and_the_last_writes_in_place():
    memory = paged()
    memory.admit("a", 6)
    memory.fork("a", "b")
    memory.fork("a", "c")
    for request_id in ("b", "c", "a"):
        assert memory.grow(request_id)
    assert memory.take_copies() == [BlockCopy(1, 2), BlockCopy(1, 3)]
    assert memory.block_ids("a") == [0, 1]
    assert memory.block_ids("b") == [0, 2]
    assert memory.block_ids("c") == [0, 3]
    assert refcounts(memory, "a") == [3, 1]


def test_a_full_tail_is_never_copied():
    memory = paged()
    memory.admit("a", 8)
    memory.fork("a", "b")
    memory.grow("a")
    memory.grow("b")
    assert memory.take_copies() == []
    assert memory.block_ids("a")[:2] == memory.block_ids("b")[:2]
    assert memory.block_ids("a")[2] != memory.block_ids("b")[2]


def test_copies_are_taken_once():
    memory = paged()
    memory.admit("a", 2)
    memory.fork("a", "b")
    memory.grow("b", 3)
    assert memory.take_copies() == [BlockCopy(0, 1)]
    assert memory.take_copies() == []


@pytest.mark.parametrize("n", [1, 3])
def test_growth_into_a_shared_block_is_all_or_nothing(n):
    memory = paged(num_blocks=1)
    memory.admit("a", 2)
    memory.fork("a", "b")
    before = snapshot(memory)
    assert not memory.grow("b", n)
    assert snapshot(memory) == before
    memory.release("a")
    assert memory.grow("b")
    assert memory.take_copies() == []


def test_a_request_that_leaves_takes_its_copies_with_it():
    memory = paged()
    memory.admit("a", 2)
    memory.fork("a", "b")
    memory.fork("a", "c")
    memory.grow("b")
    memory.grow("c")
    memory.release("b")
    assert memory.take_copies() == [BlockCopy(0, 2)]


def test_a_release_leaves_the_others_their_blocks():
    memory = paged()
    memory.admit("a", 6)
    memory.fork("a", "b")
    blocks = list(memory.block_ids("b"))
    memory.release("a")
    assert memory.block_ids("b") == blocks
    assert refcounts(memory, "b") == [1, 1]
    memory.release("b")
    assert_empty(memory)


def test_bad_forks_are_refused_and_change_nothing():
    memory = paged(host_blocks=4)
    for request_id in ("a", "b", "out"):
        memory.admit(request_id, 3)
    memory.swap_out(["out"])
    before = snapshot(memory)
    for error, message, arguments in (
        (KeyError, "'x' is not in memory", ("x", "y")),
        (KeyError, "'out' is swapped out", ("out", "y")),
        (ValueError, "'b' is already in memory", ("a", "b")),
        (ValueError, "'a' is already in memory", ("a", "a")),
        (ValueError, "'out' is swapped out", ("a", "out")),
    ):
        with pytest.raises(error, match=message):
            memory.fork(*arguments)
        assert snapshot(memory) == before


def test_a_fork_after_a_promised_copy_loses_nothing():
    """The child shares a block that is still to be filled.

    Either the copy outlives the parent, or the fork is refused.
    """
    memory = paged()
    memory.admit("a", 2)
    memory.fork("a", "b")
    memory.grow("a")  # its tail is to be copied from the shared block
    try:
        memory.fork("a", "c")
    except ValueError:
        assert memory.request_ids == {"a", "b"}
        return
    memory.release("a")
    (block,) = memory.block_ids("c")
    assert memory.take_copies() == [BlockCopy(0, block)]


def test_a_fork_after_a_promised_copy_reads_its_source_in_time():
    """The source is given back, and is the next copy's destination.

    Either the copies are in an order that works, or the fork is refused.
    """
    memory = paged(num_blocks=5)
    memory.admit("a", 2)
    memory.admit("x", 2)
    contents = ["a's", "x's", "", "", ""]
    memory.fork("a", "b")
    memory.fork("x", "y")
    memory.grow("a")
    try:
        memory.fork("a", "c")
    except ValueError:
        assert memory.request_ids == {"a", "b", "x", "y"}
        return
    memory.release("b")
    memory.admit("z", 8)
    memory.grow("x")
    memory.release("z")
    memory.grow("c")
    for source, destination in memory.take_copies():
        contents[destination] = contents[source]
    for request_id, expected in (("a", "a's"), ("c", "a's"), ("x", "x's")):
        assert contents[memory.block_ids(request_id)[0]] == expected


# --- Usage of shared blocks ------------------------------------------------


def test_shared_slots_count_once():
    memory = paged(num_blocks=8)
    memory.admit("a", 6, 10)
    memory.fork("a", "b")
    # Two blocks for both: 6 tokens, 2 slots that will hold one.
    assert memory.usage() == Usage(6, 2, 0, 24)
    memory.grow("a")
    # a: 4 shared, 3 in its own block; b: 2 in the old tail.
    assert memory.usage() == Usage(4 + 3 + 2, 1 + 2, 0, 20)


def test_a_shared_block_is_as_full_as_the_longest_says():
    memory = paged(num_blocks=8)
    memory.admit("a", 4, 6)
    memory.fork("a", "b")
    memory.grow("a")
    memory.grow("b", 2)
    # One shared full block; of the tails, one has a slot to come. Neither
    # will ever fill its last two.
    assert memory.usage() == Usage(4 + 1 + 2, 1, 2 + 2, 20)


def test_unknown_ends_count_what_is_held_as_reserved():
    memory = paged(num_blocks=4)
    memory.admit("a", 5)
    memory.fork("a", "b")
    assert memory.usage() == Usage(5, 3, 0, 8)


def test_what_is_swapped_out_is_not_in_the_pool():
    memory = paged(num_blocks=4, host_blocks=4)
    memory.admit("a", 5)
    memory.admit("b", 3)
    memory.swap_out(["a"])
    assert memory.usage() == Usage(3, 1, 0, 12)


# --- Swaps -----------------------------------------------------------------


def test_a_swap_out_pairs_each_block_with_one_on_the_host():
    memory = paged(host_blocks=3)
    memory.admit("x", 4)
    memory.admit("a", 6)
    assert memory.swap_out(["a"]) == [BlockCopy(1, 0), BlockCopy(2, 1)]
    assert memory.request_ids == {"x", "a"}
    assert memory.allocator.used_blocks == 1
    assert memory.host.used_blocks == 2
    memory.assert_consistent()


def test_a_swap_in_goes_to_any_free_blocks():
    memory = paged(num_blocks=4, host_blocks=3)
    memory.admit("a", 6)
    memory.swap_out(["a"])
    memory.admit("b", 4)
    pairs = memory.swap_in(["a"])
    assert pairs == [BlockCopy(0, 3), BlockCopy(1, 1)]
    assert memory.block_ids("a") == [3, 1]
    assert memory.length("a") == 6
    assert memory.host.used_blocks == 0
    memory.assert_consistent()


def test_what_is_shared_is_moved_once_and_stays_shared():
    memory = paged(host_blocks=3)
    memory.admit("a", 6)
    memory.fork("a", "b")
    memory.grow("b")
    memory.take_copies()
    assert memory.swap_out(["a", "b"]) == [
        BlockCopy(0, 0),
        BlockCopy(1, 1),
        BlockCopy(2, 2),
    ]
    assert [memory.host.refcount(b) for b in range(3)] == [2, 1, 1]
    assert len(memory.swap_in(["b", "a"])) == 3
    assert refcounts(memory, "a") == [2, 1]
    assert memory.block_ids("a")[0] == memory.block_ids("b")[0]
    assert (memory.length("a"), memory.length("b")) == (6, 7)
    memory.assert_consistent()


def test_a_block_shared_with_one_who_stays_is_on_both_sides():
    memory = paged(host_blocks=2)
    memory.admit("a", 6)
    memory.fork("a", "b")
    blocks = list(memory.block_ids("a"))
    assert memory.swap_out(["a"]) == [BlockCopy(0, 0), BlockCopy(1, 1)]
    assert memory.block_ids("b") == blocks
    assert refcounts(memory, "b") == [1, 1]
    memory.assert_consistent()


def test_a_promised_copy_is_swapped_out_from_its_source():
    memory = paged(host_blocks=4)
    memory.admit("a", 6)
    memory.fork("a", "b")
    memory.grow("b")  # block 2, to be copied from block 1
    assert memory.block_ids("b") == [0, 2]
    assert memory.swap_out(["a", "b"]) == [
        BlockCopy(0, 0),
        BlockCopy(1, 1),
        BlockCopy(1, 2),
    ]
    assert memory.take_copies() == []


def test_copies_of_those_who_stay_are_still_to_be_made():
    memory = paged(host_blocks=4)
    memory.admit("a", 2)
    memory.fork("a", "b")
    memory.admit("x", 2)
    memory.grow("b")
    memory.swap_out(["x"])
    assert memory.take_copies() == [BlockCopy(0, 2)]


def test_a_host_with_too_little_room_refuses_and_nothing_changes():
    memory = paged(host_blocks=3)
    memory.admit("a", 8)
    memory.admit("b", 8)
    before = snapshot(memory)
    assert memory.swap_out(["a", "b"]) is None
    assert snapshot(memory) == before
    assert paged().swap_out([]) is None
    assert memory.swap_out([]) == []


def test_without_a_host_nothing_is_swapped():
    memory = paged()
    memory.admit("a", 1)
    before = snapshot(memory)
    assert memory.swap_out(["a"]) is None
    assert snapshot(memory) == before


@pytest.mark.parametrize("keep_free", [5, 8])
def test_a_pool_with_too_little_room_refuses_to_swap_in(keep_free):
    memory = paged(num_blocks=4, host_blocks=2)
    memory.admit("a", 8)
    memory.swap_out(["a"])
    memory.admit("b", 4)
    before = snapshot(memory)
    assert memory.swap_in(["a"], keep_free=keep_free) is None
    assert snapshot(memory) == before
    assert memory.swap_in(["a"], keep_free=4) is not None


def test_swaps_of_the_wrong_requests_are_refused_and_change_nothing():
    memory = paged(host_blocks=4)
    for request_id in ("in", "out"):
        memory.admit(request_id, 3)
    memory.swap_out(["out"])
    before = snapshot(memory)
    for error, message, call in (
        (
            KeyError,
            "'x' is not in memory",
            lambda: memory.swap_out(["in", "x"]),
        ),
        (KeyError, "'out' is swapped", lambda: memory.swap_out(["out"])),
        (KeyError, "'in' is not swapped", lambda: memory.swap_in(["in"])),
        (KeyError, "'x' is not", lambda: memory.swap_in(["out", "x"])),
        (ValueError, ">= 0, got -1", lambda: memory.swap_in(["out"], -1)),
        (KeyError, "'out' is swapped", lambda: memory.grow("out")),
        (KeyError, "'out' is swapped", lambda: memory.length("out")),
        (KeyError, "'out' is swapped", lambda: memory.block_ids("out")),
        (KeyError, "'out' is swapped", lambda: memory.table("out")),
        (ValueError, "'out' is swapped", lambda: memory.admit("out", 1)),
    ):
        with pytest.raises(error, match=message):
            call()
        assert snapshot(memory) == before


def test_growth_after_a_swap_in_counts_what_is_not_brought_back():
    memory = paged(host_blocks=8)
    memory.admit("a", 6)
    for name in "bc":
        memory.fork("a", name)
    memory.swap_out("abc")
    for lengths, blocks in (
        ((6, 6, 6), 0),
        ((7, 6, 6), 1),  # b and c keep the block that a copies
        ((7, 7, 7), 2),  # the last one to write owns it alone
        ((9, 6, 6), 2),
        ((9, 9, 9), 5),
    ):
        given = dict(zip("abc", lengths, strict=True))
        assert memory.growth_after_swap_in(given) == blocks
    assert memory.growth_after_swap_in({"a": 7}) == 0, "a comes alone"
    memory.release("a")
    assert memory.growth_after_swap_in({"b": 8, "c": 8}) == 1
    with pytest.raises(KeyError, match="'a' is not swapped out"):
        memory.growth_after_swap_in({"a": 7})


@pytest.mark.parametrize("seed", range(40))
def test_growth_after_a_swap_in_is_what_growing_takes(seed):
    """In any order; whatever ended, was forked or had grown before."""
    rng = random.Random(seed)
    memory = paged(60, rng.randint(1, 4), host_blocks=60)
    memory.admit(0, rng.randint(1, 9))
    count = rng.randint(1, 6)
    for new in range(1, count):
        memory.fork(rng.randrange(new), new)
        memory.grow(rng.randrange(new + 1), rng.choice([0, 0, 1, 3]))
        memory.take_copies()
    for name in rng.sample(range(count), rng.randrange(count)):
        memory.release(name)
    lengths = {
        name: memory.length(name) + rng.choice([0, 1, 1, 5])
        for name in memory.request_ids
    }
    memory.swap_out(lengths)
    growth = memory.growth_after_swap_in(lengths)
    back = len(memory.swap_in(lengths))
    for name in rng.sample(sorted(lengths), len(lengths)):
        assert memory.grow(name, lengths[name] - memory.length(name))
    assert memory.allocator.used_blocks == back + growth


def test_a_release_frees_the_host_as_well():
    memory = paged(host_blocks=4)
    memory.admit("a", 6)
    memory.fork("a", "b")
    memory.swap_out(["a", "b"])
    memory.release("a")
    assert memory.host.used_blocks == 2
    memory.release("b")
    assert_empty(memory)
    assert memory.admit("a", 6)


# --- A walk with contents --------------------------------------------------

EMPTY = -1


class Walk:
    """Steps of a scheduler gone mad, with numbers in every slot.

    A step grows, and may take requests out; a step that took nobody out may
    bring some back. Then blocks are moved as memory says, and the new slots
    are written. Between steps requests are forked and released.
    """

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        size = rng.randint(1, 4)
        blocks, host = rng.randint(2, 12), rng.choice([0, 1, 3, 12])
        self.memory = paged(blocks, size, host)
        self.size = size
        self.device = np.full((blocks, size), EMPTY)
        self.host = np.full((host, size), EMPTY)
        self.texts = {}  # the model: what each request has written
        self.out = set()
        self.ids = iter(range(10**6))
        self.seen = dict.fromkeys(
            ("forks", "copies", "outs", "ins", "promised", "refused"), 0
        )

    def step(self):
        gone, moves = self.take_out_and_grow()
        ins = [] if gone else self.bring_in()
        copies = self.memory.take_copies()
        self.seen["copies"] += len(copies)
        self.move(self.device, self.host, moves)
        self.move(self.host, self.device, ins)
        self.move(self.device, self.device, copies)
        self.wipe()
        self.write()
        self.check()
        self.between_steps()
        self.check()

    def here(self):
        return [i for i in self.texts if i not in self.out]

    def take_out_and_grow(self):
        gone, moves = False, []
        for request_id in self.here():
            if self.rng.random() < 0.7:
                grown = self.memory.grow(request_id, self.rng.randint(0, 3))
                self.seen["refused"] += not grown
                gone |= not grown
            if self.rng.random() < 0.1 or gone:
                victims = self.victims()
                gone |= bool(victims)
                moves += self.swap_out_or_release(victims)
            if gone:
                break
        return gone, moves

    def victims(self):
        here = self.here()
        return self.rng.sample(here, self.rng.randint(0, len(here)))

    def swap_out_or_release(self, victims):
        tables = [self.memory.block_ids(victim) for victim in victims]
        promised = any(b in self.memory._copies for t in tables for b in t)
        pairs = self.memory.swap_out(victims)
        if pairs is None:
            for victim in victims:
                self.release(victim)
            return []
        self.out.update(victims)
        self.seen["outs"] += bool(victims)
        self.seen["promised"] += promised
        return pairs

    def bring_in(self):
        pairs = []
        group = self.rng.sample(
            sorted(self.out), self.rng.randint(0, len(self.out))
        )
        brought = self.memory.swap_in(group, self.rng.choice([0, 0, 3]))
        if brought is not None:
            pairs = brought
            self.out.difference_update(group)
            self.seen["ins"] += bool(group)
        new = next(self.ids)
        if self.memory.admit(new, self.rng.randint(1, 9)):
            self.texts[new] = []
        return pairs

    def move(self, source, destination, pairs):
        ends = [pair.destination for pair in pairs]
        assert len(set(ends)) == len(ends), "a block is filled twice"
        for old, new in pairs:
            destination[new] = source[old]

    def wipe(self):
        """Empty the blocks that nobody has: what they held is lost."""
        pools = [(self.memory.allocator, self.device)]
        if self.memory.host is not None:
            pools.append((self.memory.host, self.host))
        for allocator, contents in pools:
            for block in range(allocator.num_blocks):
                if allocator.refcount(block) == 0:
                    contents[block] = EMPTY

    def write(self):
        for request_id in self.here():
            text, table = self.texts[request_id], self.memory.table(request_id)
            for position in range(len(text), table.length):
                text.append(self.rng.randrange(10**9))
                self.device[table.translate(position)] = text[-1]

    def between_steps(self):
        here = self.here()
        for request_id in here:
            if self.rng.random() < 0.2 and len(self.texts) < 8:
                child = next(self.ids)
                self.memory.fork(request_id, child)
                self.texts[child] = list(self.texts[request_id])
                self.seen["forks"] += 1
        for request_id in list(self.texts):
            if self.rng.random() < 0.12:
                self.release(request_id)

    def release(self, request_id):
        self.memory.release(request_id)
        del self.texts[request_id]
        self.out.discard(request_id)

    def check(self):
        memory = self.memory
        memory.assert_consistent()
        assert memory.request_ids == set(self.texts)
        filled = set()
        for request_id, text in self.texts.items():
            away = request_id in self.out
            tables = memory._host_tables if away else memory._tables
            contents = self.host if away else self.device
            table = tables[request_id]
            places = [table.translate(p) for p in range(len(text))]
            assert [int(contents[place]) for place in places] == text
            if not away:
                filled.update(places)
                assert memory.length(request_id) == len(text)
        usage = memory.usage()
        assert sum(usage) == memory.capacity
        assert usage.token_states == len(filled)


def test_contents_survive_forks_swaps_and_copies_in_any_order():
    seen = dict.fromkeys(
        ("forks", "copies", "outs", "ins", "promised", "refused"), 0
    )
    for seed in range(800):
        walk = Walk(seed)
        for _ in range(25):
            walk.step()
        for request_id in list(walk.texts):
            walk.release(request_id)
        assert_empty(walk.memory)
        for name, count in walk.seen.items():
            seen[name] += count
    assert min(seen.values()) > 30, seen


def test_a_group_comes_back_with_exactly_its_distinct_blocks():
    memory = PagedMemory(BlockAllocator(4, 4), host_blocks=4)
    memory.admit("a", 8)
    memory.fork("a", "b")
    memory.swap_out(["a", "b"])
    memory.admit("other", 8)
    assert len(memory.swap_in(["a", "b"])) == 2
    assert memory.allocator.free_blocks == 0


def test_growth_past_the_announced_end_is_still_token_states():
    memory = PagedMemory(BlockAllocator(4, 4))
    memory.admit("a", 2, 3)
    memory.grow("a", 2)
    assert memory.usage() == Usage(4, 0, 0, 12)
