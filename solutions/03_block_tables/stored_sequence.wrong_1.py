# ruff: noqa: F821
class StoredSequence:
    """Wrong: counts the new values before it has a block for them."""

    def __init__(self, allocator: BlockAllocator, pool: np.ndarray) -> None:
        self.allocator, self.pool = allocator, pool
        self.size = allocator.block_size
        self.block_ids: list[int] = []
        self.length = 0

    def append(self, value: float) -> None:
        """Store one value."""
        self.extend([value])

    def extend(self, values: list[float]) -> None:
        """Store all values, or none."""
        first = self.length
        self.length += len(values)
        needed = self.allocator.blocks_needed(self.length)
        new = needed - len(self.block_ids)
        self.block_ids += self.allocator.allocate(new)
        for position, value in enumerate(values, start=first):
            block, offset = divmod(position, self.size)
            self.pool[self.block_ids[block], offset] = value

    def read(self) -> list[float]:
        """Return the values in order."""
        return self.pool[self.block_ids].reshape(-1)[: self.length].tolist()

    def truncate(self, length: int) -> None:
        """Forget the values from `length` on."""
        for position in range(length, self.length):
            block, offset = divmod(position, self.size)
            self.pool[self.block_ids[block], offset] = np.nan
        while len(self.block_ids) > self.allocator.blocks_needed(length):
            self.allocator.free(self.block_ids.pop())
        self.length = length
