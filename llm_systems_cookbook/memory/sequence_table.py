"""The block table of one sequence, and the fork that shares it."""

import operator
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from llm_systems_cookbook.memory.allocator import BlockAllocator
from llm_systems_cookbook.validate import cdiv, require_at_least


class BlockCopy(NamedTuple):
    """A copy of one block's contents that the caller has to make.

    Make it before anything else is written to either block: once the table
    has let go of `source`, another owner may overwrite it in place.
    """

    source: int
    destination: int


def _owners(allocator: BlockAllocator, block_id: int, listed: int = 1) -> int:
    """Return a block's owners; refuse fewer than the times it is listed.

    Raises:
        ValueError: fewer: somebody else gave the block back.
    """
    owners = allocator.refcount(block_id)
    if owners < listed:
        raise ValueError(
            f"block {block_id} has {owners} owners, needs {listed}"
        )
    return owners


class SequenceTable:
    """Map a sequence's token positions to blocks.

    The token at position p lies in block `block_ids[p // block_size]`, at
    offset `p % block_size`. A table holds exactly the blocks that its length
    needs, so only the last one, the tail, can be partly filled. A table knows
    no allocator: pass the same one to every call.

    Source: section 4.3 of Kwon et al., SOSP 2023, and Fig. 6.

    Args:
        block_size: tokens per block, at least 1.
        block_ids: physical block of each logical block, in order.
        length: tokens in the sequence.

    Raises:
        TypeError: block_size, length or a block id is not an integer.
        ValueError: block_size below 1, length below 0, or a number of blocks
            other than the length needs.
    """

    def __init__(
        self, block_size: int, block_ids: Iterable[int] = (), length: int = 0
    ) -> None:
        (self.block_size,) = require_at_least(1, block_size=block_size)
        (self.length,) = require_at_least(0, length=length)
        self.block_ids = [operator.index(b) for b in block_ids]
        if self._blocks_for(self.length) != len(self.block_ids):
            raise ValueError(
                f"{length} tokens need {self._blocks_for(self.length)} blocks"
                f" of {block_size}, got {len(self.block_ids)}"
            )

    def _blocks_for(self, length: int) -> int:
        return cdiv(length, self.block_size)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks the table holds."""
        return len(self.block_ids) * self.block_size

    def translate(self, position: int) -> tuple[int, int]:
        """Return (block id, offset in the block) of a token position.

        Raises:
            IndexError: position outside [0, length).
        """
        if not 0 <= position < self.length:
            raise IndexError(
                f"position {position} is outside [0, {self.length})"
            )
        block, offset = divmod(operator.index(position), self.block_size)
        return self.block_ids[block], offset

    def slot(self, position: int) -> int:
        """Return the index of a token's slot in the whole pool.

        Raises:
            IndexError: position outside [0, length).
        """
        block_id, offset = self.translate(position)
        return operator.index(block_id) * self.block_size + offset

    def append(self, allocator: BlockAllocator) -> BlockCopy | None:
        """Make room for one token; return the copy to make, if any.

        A full table takes a new block. A partly filled tail that is shared
        is replaced by a fresh block first (copy-on-write).

        Raises:
            OutOfBlocks: no block is free; nothing has changed.
            ValueError: the tail has no owner; nothing has changed.
        """
        copy = None
        if self.length == self.capacity:
            self.block_ids.append(allocator.alloc())
        elif self._tail_is_shared(allocator):
            copy = self._replace_tail(allocator, allocator.alloc())
        self.length += 1
        return copy

    def extend(self, allocator: BlockAllocator, n: int) -> list[BlockCopy]:
        """Make room for `n` tokens, or for none at all.

        Returns:
            The copies to make: none, or one of the shared tail.

        Raises:
            OutOfBlocks: too few free blocks; nothing has changed.
            TypeError: n is not an integer.
            ValueError: n below 0, or the tail has no owner; nothing has
                changed.
        """
        (n,) = require_at_least(0, n=n)
        if n == 0:  # nothing is written: a shared tail needs no copy
            return []
        copies = []
        needed = self._blocks_for(self.length + n) - len(self.block_ids)
        if self._tail_is_shared(allocator):
            fresh, *blocks = allocator.allocate(1 + needed)  # all or none
            copies.append(self._replace_tail(allocator, fresh))
        else:
            blocks = allocator.allocate(needed)
        self.block_ids += blocks
        self.length += n
        return copies

    def _tail_is_shared(self, allocator: BlockAllocator) -> bool:
        partly_filled = self.length < self.capacity
        return partly_filled and _owners(allocator, self.block_ids[-1]) > 1

    def _replace_tail(self, allocator: BlockAllocator, new: int) -> BlockCopy:
        shared = self.block_ids[-1]
        self.block_ids[-1] = new
        allocator.free(shared)
        return BlockCopy(source=shared, destination=new)

    def truncate(self, allocator: BlockAllocator, length: int) -> None:
        """Forget the tokens from `length` on; give back whole blocks.

        Rejected draft tokens leave this way. A block that keeps a token is
        kept, also when it is shared: the next append copies it.

        Raises:
            TypeError: length is not an integer.
            ValueError: length outside [0, self.length], or a block to give
                back has no owner left to give up; nothing has changed.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length {length} is outside [0, {self.length}]")
        (length,) = require_at_least(0, length=length)
        given_back = Counter(self.block_ids[self._blocks_for(length) :])
        for block_id, listed in given_back.items():  # before any is freed
            _owners(allocator, block_id, listed)
        while len(self.block_ids) > self._blocks_for(length):
            allocator.free(self.block_ids[-1])
            self.block_ids.pop()
        self.length = length

    def free(self, allocator: BlockAllocator) -> None:
        """Give back every block; the table is empty afterwards.

        Raises:
            ValueError: a block has no owner left; nothing has changed.
        """
        self.truncate(allocator, 0)


def fork_sequence(
    parent: SequenceTable, allocator: BlockAllocator
) -> SequenceTable:
    """Return a second sequence that shares every block of the first.

    Takes no block and copies nothing: a shared tail is copied when one of its
    owners appends to it (lazy copy-on-write). The last owner has the block
    alone, and writes in place.

    Source: section 4.4 of Kwon et al., SOSP 2023, and Fig. 8.

    Raises:
        ValueError: a block of the parent is free, or the parent does not have
            the blocks that its length needs; nothing has changed.
    """
    child = SequenceTable(parent.block_size, parent.block_ids, parent.length)
    # A block may be listed twice, or be free: what was not shared must not
    # be freed when the rest is undone.
    shared: list[int] = []
    try:
        for block_id in child.block_ids:
            allocator.incref(block_id)
            shared.append(block_id)
    except ValueError:
        for block_id in shared:
            allocator.free(block_id)
        raise
    return child
