# ruff: noqa: F821
class TakingAllocator:
    """Mark a taken block, skip it in alloc, and forget its old place."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = deque(range(num_blocks))
        self.is_free = [True] * num_blocks

    def alloc(self) -> int:
        """Take the block that has been free longest."""
        while self.queue:
            block_id = self.queue.popleft()
            if self.is_free[block_id]:
                self.is_free[block_id] = False
                return block_id
        raise OutOfBlocks(needed=1, free=0)

    def take(self, block_id: int) -> None:
        """Take this block out of the free list."""
        if not 0 <= block_id < len(self.is_free) or not self.is_free[block_id]:
            raise ValueError(f"block {block_id} is not free")
        self.is_free[block_id] = False

    def free(self, block_id: int) -> None:
        """Give it back: its old place in the queue is still there too."""
        if not 0 <= block_id < len(self.is_free) or self.is_free[block_id]:
            raise ValueError(f"block {block_id} is not in use")
        self.is_free[block_id] = True
        self.queue.append(block_id)
