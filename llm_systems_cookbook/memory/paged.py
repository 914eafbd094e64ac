"""Paged memory: each request gets a block when it needs one."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from llm_systems_cookbook.memory.allocator import BlockAllocator, OutOfBlocks
from llm_systems_cookbook.memory.manager import (
    Usage,
    checked_lengths,
    get_known,
    require_unknown,
)
from llm_systems_cookbook.memory.sequence_table import (
    BlockCopy,
    SequenceTable,
    fork_sequence,
)
from llm_systems_cookbook.validate import cdiv, require_at_least


class PagedMemory:
    """Give each request a block when it needs one.

    The only owner of its allocator. A request's final length is used for
    accounting alone, never to decide. Requests may share blocks (`fork`): a
    request that grows into a shared block gets its own, and the copy to make
    waits in `take_copies`. With host blocks, requests can be moved out of
    the pool and back (`swap_out`, `swap_in`).

    Source: sections 4.3 to 4.5 of Kwon et al., SOSP 2023.

    Args:
        allocator: the pool; nothing else may take or free its blocks.
        host_blocks: blocks of the same size in the host's memory.

    Attributes:
        allocator: as given.
        host: the allocator of the host's blocks; None when there are none.

    Raises:
        TypeError: host_blocks is not an integer.
        ValueError: host_blocks below 0.
    """

    shares_blocks = True

    def __init__(
        self, allocator: BlockAllocator, host_blocks: int = 0
    ) -> None:
        (host_blocks,) = require_at_least(0, host_blocks=host_blocks)
        self.allocator = allocator
        self.block_size = allocator.block_size
        self.host: BlockAllocator | None = None
        if host_blocks > 0:
            self.host = BlockAllocator(host_blocks, self.block_size)
        self._tables: dict[Hashable, SequenceTable] = {}
        self._host_tables: dict[Hashable, SequenceTable] = {}
        self._finals: dict[Hashable, int | None] = {}
        self._copies: dict[int, BlockCopy] = {}  # by destination

    @property
    def capacity(self) -> int:
        """Token slots in the whole pool."""
        return self.allocator.num_blocks * self.block_size

    def fits(
        self, num_tokens: int, samples: int = 1, shared_tokens: int = 0
    ) -> bool:
        """Tell whether a request of this final length will fit, if alone.

        Args:
            num_tokens: tokens of each sample at its end, at least 1.
            samples: sequences of the request, at least 1.
            shared_tokens: tokens that the samples begin with together; the
                full blocks of these are held once.
        """
        num_tokens, samples = require_at_least(
            1, num_tokens=num_tokens, samples=samples
        )
        (shared_tokens,) = require_at_least(0, shared_tokens=shared_tokens)
        each = cdiv(num_tokens, self.block_size)
        # Rounded down, because all samples but the last copy a partly filled
        # block.
        shared = min(shared_tokens // self.block_size, each)
        if num_tokens <= shared_tokens:
            shared = each  # no sample ever writes, so nothing is copied
        needed = shared + samples * (each - shared)
        return needed <= self.allocator.num_blocks

    def admit(
        self,
        request_id: Hashable,
        num_tokens: int,
        final_tokens: int | None = None,
        keep_free: int = 0,
    ) -> bool:
        """Take blocks for a new request; False when too few are free.

        Args:
            request_id: a name not in use.
            num_tokens: tokens to hold now, at least 1.
            final_tokens: tokens held at the end, for `usage` alone.
            keep_free: slots that must stay free, in whole blocks.

        Raises:
            ValueError: the id is in use, lengths out of order, or keep_free
                below 0.
        """
        self._require_new(request_id)
        num_tokens, final_tokens = checked_lengths(num_tokens, final_tokens)
        needed = cdiv(num_tokens, self.block_size)
        if not self._has_room(needed, keep_free):
            return False
        # Filled here, not by `extend`, which would check the length again.
        table = SequenceTable(self.block_size)
        table.block_ids = self.allocator.allocate(needed)
        table.length = num_tokens
        self._tables[request_id] = table
        self._finals[request_id] = final_tokens
        return True

    def _require_new(self, request_id: Hashable) -> None:
        require_unknown(self._tables, request_id)
        # A name on the host stays taken: if another request took it, the
        # first one could not come back.
        if request_id in self._host_tables:
            raise ValueError(f"request {request_id!r} is swapped out")

    def _has_room(self, needed: int, keep_free: int) -> bool:
        """Tell whether enough blocks stay free when so many are taken."""
        (keep_free,) = require_at_least(0, keep_free=keep_free)
        kept = cdiv(keep_free, self.block_size)
        return needed + kept <= self.allocator.free_blocks

    def grow(self, request_id: Hashable, num_tokens: int = 1) -> bool:
        """Make room for more tokens; False when too few blocks are free.

        Raises:
            KeyError: unknown request.
            ValueError: num_tokens below 0.
        """
        table = self.table(request_id)
        try:
            # Every decode step comes here, so one token takes the short way.
            # A numpy 1 takes the other way, which checks it.
            if isinstance(num_tokens, int) and num_tokens == 1:
                copy = table.append(self.allocator)
                copies = [] if copy is None else [copy]
            else:
                copies = table.extend(self.allocator, num_tokens)
        except OutOfBlocks:
            return False
        # The key is the destination, because until the copy is made only this
        # request has that block, while several copies may share a source.
        self._copies |= {copy.destination: copy for copy in copies}
        return True

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to make before the next write, and forget them.

        Copies for a request that has left the pool in the meantime are not
        needed any more, so they are not returned.
        """
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Let a new request share all blocks of another; takes none.

        Raises:
            KeyError: unknown request.
            ValueError: the new id is in use, or a block of the parent still
                waits for its copy.
        """
        parent = self.table(request_id)
        # The child would share the destination, and the copy would be
        # forgotten as soon as either of the two leaves.
        if not self._copies.keys().isdisjoint(parent.block_ids):
            raise ValueError(
                f"request {request_id!r} has a copy to make: take_copies first"
            )
        self._require_new(new_id)
        self._tables[new_id] = fork_sequence(parent, self.allocator)
        self._finals[new_id] = self._finals[request_id]

    def release(self, request_id: Hashable) -> None:
        """Give back a request's blocks, on the device or on the host.

        Raises:
            KeyError: unknown request.
        """
        if request_id in self._host_tables:
            self._host_tables.pop(request_id).free(self.host)
        else:
            table = self.table(request_id)
            del self._tables[request_id]
            self._give_back(table)
        del self._finals[request_id]

    def swap_out(
        self, request_ids: Iterable[Hashable]
    ) -> list[BlockCopy] | None:
        """Move requests to the host; None when it has too little room.

        Blocks that they share are moved once, and shared there. Contents
        are to be copied before any of the step's writes.

        Returns:
            Pairs of a device block and the host block it goes to.

        Raises:
            KeyError: unknown request, or one that is swapped out already.
        """
        # All names are looked up first, so that an unknown one moves nobody.
        tables = {i: self.table(i) for i in request_ids}
        if self.host is None or _distinct(tables) > self.host.free_blocks:
            return None
        pairs = [
            BlockCopy(self._filled_by(block_id), host_id)
            for block_id, host_id in _move(
                tables, self._tables, self._host_tables, self.host
            )
        ]
        # Only now: until here a promised copy says where the contents are.
        for table in tables.values():
            self._give_back(table)
        return pairs

    def _give_back(self, table: SequenceTable) -> None:
        """Give back a table's blocks, and forget the copies into them."""
        # Made later, such a copy would overwrite the next owner's tokens.
        for block_id in table.block_ids if self._copies else ():
            self._copies.pop(block_id, None)
        table.free(self.allocator)

    def _filled_by(self, block_id: int) -> int:
        """Return where a block's contents are while a copy is promised.

        Swaps are made before copies, so the destination is still empty.
        """
        copy = self._copies.get(block_id)
        return block_id if copy is None else copy.source

    def swap_in(
        self, request_ids: Iterable[Hashable], keep_free: int = 0
    ) -> list[BlockCopy] | None:
        """Move requests back; None when too few blocks are free.

        Args:
            request_ids: requests that are swapped out.
            keep_free: slots that must stay free, in whole blocks.

        Returns:
            Pairs of a host block and the device block it goes to.

        Raises:
            KeyError: a request that is not swapped out.
            ValueError: keep_free below 0.
        """
        tables = {i: self._swapped(i) for i in request_ids}
        if not self._has_room(_distinct(tables), keep_free):
            return None
        pairs = _move(tables, self._host_tables, self._tables, self.allocator)
        for table in tables.values():
            table.free(self.host)
        return pairs

    def growth_after_swap_in(self, lengths: Mapping[Hashable, int]) -> int:
        """Return the blocks that requests take once they are back.

        They come on top of those that `swap_in` takes: blocks for more
        tokens, and for copies of shared tails that are written.

        Args:
            lengths: tokens that each request is to hold, by the ids of
                requests that are swapped out together.

        Raises:
            KeyError: a request that is not swapped out.
        """
        tables = {i: self._swapped(i) for i in lengths}
        owners = Counter(b for t in tables.values() for b in t.block_ids)
        writers: Counter[int] = Counter()
        blocks = 0
        for request_id, table in tables.items():
            length = max(lengths[request_id], table.length)
            blocks += cdiv(length, self.block_size) - len(table.block_ids)
            if table.length < min(length, table.capacity):
                writers[table.block_ids[-1]] += 1
        # The last owner of a shared tail writes in place, without a copy.
        copies = [min(n, owners[tail] - 1) for tail, n in writers.items()]
        return blocks + sum(copies)

    def _swapped(self, request_id: Hashable) -> SequenceTable:
        if request_id not in self._host_tables:
            raise KeyError(f"request {request_id!r} is not swapped out")
        return self._host_tables[request_id]

    @property
    def request_ids(self) -> set[Hashable]:
        """Requests that hold memory, on the device or on the host."""
        return {*self._tables, *self._host_tables}

    def table(self, request_id: Hashable) -> SequenceTable:
        """Return a request's block table, to read.

        Raises:
            KeyError: unknown request, or one that is swapped out.
        """
        # Only one look-up, because every token of a sequence comes here.
        table = self._tables.get(request_id)
        if table is not None:
            return table
        if request_id in self._host_tables:
            raise KeyError(f"request {request_id!r} is swapped out")
        return get_known(self._tables, request_id)  # for its error

    def length(self, request_id: Hashable) -> int:
        """Return for how many tokens a request has room.

        Raises:
            KeyError: unknown request, or one that is swapped out.
        """
        return self.table(request_id).length

    def block_ids(self, request_id: Hashable) -> list[int]:
        """Return a request's blocks, in the order of its tokens.

        Raises:
            KeyError: unknown request, or one that is swapped out.
        """
        return self.table(request_id).block_ids

    def assert_consistent(self) -> None:
        """Check both pools, and that each reference is a request's.

        Raises:
            AssertionError: naming what is wrong.
        """
        pools = [(self.allocator, self._tables)]
        if self.host is not None:
            pools.append((self.host, self._host_tables))
        for allocator, tables in pools:
            allocator.assert_consistent()
            listed = Counter(
                b for table in tables.values() for b in table.block_ids
            )
            for block_id in range(allocator.num_blocks):
                count = allocator.refcount(block_id)
                if count != listed[block_id]:
                    raise AssertionError(
                        f"block {block_id} has {count} references, and "
                        f"{listed[block_id]} block tables list it"
                    )

    def usage(self) -> Usage:
        """Return where the pool's slots are now; shared slots count once."""
        token_states = reserved = internal = blocks = 0
        for request_id, table in self._tables.items():
            end = self._end(request_id, table)
            token_states += table.length
            reserved += end - table.length
            internal += table.capacity - end
            blocks += len(table.block_ids)
        # Tables list more than is used: shared blocks were counted twice.
        if blocks != self.allocator.used_blocks:
            return self._usage_of_shared()
        taken = token_states + reserved + internal
        return Usage(token_states, reserved, internal, self.capacity - taken)

    def _end(self, request_id: Hashable, table: SequenceTable) -> int:
        """Return how much of its blocks a request may still fill."""
        final = self._finals[request_id]
        if final is None:
            return table.capacity
        return min(table.capacity, max(final, table.length))

    def _usage_of_shared(self) -> Usage:
        filled: Counter[int] = Counter()
        ends: Counter[int] = Counter()
        for request_id, table in self._tables.items():
            end = self._end(request_id, table)
            for i, block_id in enumerate(table.block_ids):
                before = i * self.block_size
                # Sharers may differ in length: the longest says how full.
                here = min(self.block_size, table.length - before)
                filled[block_id] = max(filled[block_id], here)
                here = min(self.block_size, end - before)
                ends[block_id] = max(ends[block_id], here)
        token_states, end = filled.total(), ends.total()
        taken = self.allocator.used_blocks * self.block_size
        external = self.capacity - taken
        return Usage(token_states, end - token_states, taken - end, external)


def _distinct(tables: Mapping[Hashable, SequenceTable]) -> int:
    return len({b for table in tables.values() for b in table.block_ids})


def _move(
    tables: Mapping[Hashable, SequenceTable],
    old: dict[Hashable, SequenceTable],
    new: dict[Hashable, SequenceTable],
    allocator: BlockAllocator,
) -> list[BlockCopy]:
    """Give tables blocks of another pool; return the pairs to copy.

    What is shared stays shared. The old blocks are the caller's to free.
    """
    moved: dict[int, int] = {}
    for request_id, table in tables.items():
        for block_id in table.block_ids:
            if block_id in moved:
                allocator.incref(moved[block_id])
            else:
                moved[block_id] = allocator.alloc()
        block_ids = [moved[b] for b in table.block_ids]
        new[request_id] = SequenceTable(
            table.block_size, block_ids, table.length
        )
        del old[request_id]
    return [BlockCopy(*pair) for pair in moved.items()]
