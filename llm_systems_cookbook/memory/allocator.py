"""The block allocator: which blocks are free, and who shares the others."""

from collections import Counter, deque

from llm_systems_cookbook.validate import cdiv, require_at_least


class OutOfBlocks(RuntimeError):
    """Raised when more blocks are needed than are free.

    Attributes:
        needed: blocks the caller asked for.
        free: blocks that were free at that moment.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed, self.free = needed, free

    def __str__(self) -> str:
        blocks = "block" if self.needed == 1 else "blocks"
        return f"needed {self.needed} {blocks}, {self.free} free"


class BlockAllocator:
    """Hand out equal blocks by id, first in, first out, and count owners.

    A block id is an integer in [0, num_blocks). A block is either free, or
    referenced by one or more owners; its reference count says by how many.
    Every operation is O(1) per block. An operation that raises has changed
    nothing.

    Source: section 4.3 of Kwon et al., SOSP 2023 (block engine, reference
    counts in section 4.4).

    Args:
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens per block, at least 1.

    Raises:
        TypeError: num_blocks or block_size is not an integer.
        ValueError: num_blocks or block_size below 1.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks, self.block_size = require_at_least(
            1, num_blocks=num_blocks, block_size=block_size
        )
        self._free = deque(range(self.num_blocks))
        self._refcounts = [0] * self.num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks with at least one owner; a shared block counts once."""
        return self.num_blocks - len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens (rounded up).

        Raises:
            TypeError: num_tokens is not an integer.
            ValueError: num_tokens below 0.
        """
        (num_tokens,) = require_at_least(0, num_tokens=num_tokens)
        return cdiv(num_tokens, self.block_size)

    def alloc(self) -> int:
        """Take the block that has been free longest; its count becomes 1.

        Raises:
            OutOfBlocks: no block is free.
        """
        if not self._free:
            raise OutOfBlocks(needed=1, free=0)
        block_id = self._free.popleft()
        self._refcounts[block_id] = 1
        return block_id

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks, or none at all.

        Raises:
            OutOfBlocks: fewer than n blocks are free.
            TypeError: n is not an integer.
            ValueError: n below 0.
        """
        (n,) = require_at_least(0, n=n)
        if n > len(self._free):
            raise OutOfBlocks(needed=n, free=len(self._free))
        block_ids = [self._free.popleft() for _ in range(n)]
        for block_id in block_ids:
            self._refcounts[block_id] = 1
        return block_ids

    def refcount(self, block_id: int) -> int:
        """Return how many owners a block has; 0 means that it is free.

        Raises:
            ValueError: block_id outside [0, num_blocks).
        """
        if not 0 <= block_id < self.num_blocks:
            raise self._refused(block_id)
        return self._refcounts[block_id]

    def incref(self, block_id: int) -> None:
        """Add an owner to a block in use.

        Raises:
            ValueError: the block is free, or its id is out of range.
        """
        if self.refcount(block_id) == 0:
            raise self._refused(block_id)
        self._refcounts[block_id] += 1

    def free(self, block_id: int) -> None:
        """Drop one owner; the block is free again when the last one goes.

        Raises:
            ValueError: the block is already free, or its id is out of range.
        """
        # Checked in place, not by a call: nothing here is called more often.
        if not 0 <= block_id < self.num_blocks:
            raise self._refused(block_id)
        owners = self._refcounts[block_id]
        if owners == 0:
            raise self._refused(block_id)
        self._refcounts[block_id] = owners - 1
        if owners == 1:
            self._free.append(block_id)

    def _refused(self, block_id: int) -> ValueError:
        if 0 <= block_id < self.num_blocks:
            return ValueError(f"block {block_id} is free")
        return ValueError(
            f"block {block_id} is outside [0, {self.num_blocks})"
        )

    def assert_consistent(self) -> None:
        """Check that every block is free once or referenced, never both.

        Raises:
            AssertionError: naming the first block that is not, or the ids
                in the free list that are no block's.
        """
        in_free_list = Counter(self._free)
        foreign = [b for b in in_free_list if not 0 <= b < self.num_blocks]
        if foreign:
            raise AssertionError(f"no blocks, yet in the free list: {foreign}")
        for block_id, owners in enumerate(self._refcounts):
            expected = 1 if owners == 0 else 0
            if owners < 0 or in_free_list[block_id] != expected:
                raise AssertionError(
                    f"block {block_id}: {owners} owners, and "
                    f"{in_free_list[block_id]} times in the free list"
                )
