# ruff: noqa: F821
class TakingAllocator:
    """Search the queue for a plain integer, so that the id counts nothing."""

    def __init__(self, num_blocks: int) -> None:
        self.is_free = [True] * num_blocks
        self._free = deque(range(num_blocks))

    def alloc(self) -> int:
        """Take the block that has been free longest."""
        if not self._free:
            raise OutOfBlocks(needed=1, free=0)
        block_id = self._free.popleft()
        self.is_free[block_id] = False
        return block_id

    def take(self, block_id: int) -> None:
        """Take this block out of the free list."""
        if not 0 <= block_id < len(self.is_free) or not self.is_free[block_id]:
            raise ValueError(f"block {block_id} is not free")
        self._free.remove(int(block_id))
        self.is_free[block_id] = False

    def free(self, block_id: int) -> None:
        """Give a block back."""
        if not 0 <= block_id < len(self.is_free) or self.is_free[block_id]:
            raise ValueError(f"block {block_id} is not in use")
        self._free.append(block_id)
        self.is_free[block_id] = True
