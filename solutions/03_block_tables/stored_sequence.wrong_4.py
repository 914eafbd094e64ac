# ruff: noqa: F821
class StoredSequence:
    """Wrong: reads a list of its own, and writes the pool for show."""

    def __init__(self, allocator: BlockAllocator, pool: np.ndarray) -> None:
        self.allocator, self.pool = allocator, pool
        self.table = SequenceTable(allocator.block_size)
        self.stored: list[float] = []

    def append(self, value: float) -> None:
        """Store one value."""
        self.extend([value])

    def extend(self, values: list[float]) -> None:
        """Store all values, or none."""
        first = self.table.length
        self.table.extend(self.allocator, len(values))
        for position, value in enumerate(values, start=first):
            self.pool[self.table.translate(position)] = value
        self.stored += values

    def read(self) -> list[float]:
        """Return the values in order."""
        return list(self.stored)

    def truncate(self, length: int) -> None:
        """Forget the values from `length` on."""
        for position in range(length, self.table.length):
            self.pool[self.table.translate(position)] = np.nan
        self.table.truncate(self.allocator, length)
        del self.stored[length:]
