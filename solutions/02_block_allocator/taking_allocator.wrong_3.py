# ruff: noqa: F821
from collections import OrderedDict


class TakingAllocator:
    """Trust the ids: a negative one or a second free goes through."""

    def __init__(self, num_blocks: int) -> None:
        self._free = OrderedDict.fromkeys(range(num_blocks))

    def alloc(self) -> int:
        """Take the block that has been free longest."""
        if not self._free:
            raise OutOfBlocks(needed=1, free=0)
        return self._free.popitem(last=False)[0]

    def take(self, block_id: int) -> None:
        """Take this block out of the free list."""
        if block_id not in self._free:
            raise ValueError(f"block {block_id} is not free")
        del self._free[block_id]

    def free(self, block_id: int) -> None:
        """Give a block back."""
        self._free[block_id] = None
