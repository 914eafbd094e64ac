# ruff: noqa: F821
class StoredSequence:
    """Wrong: extends one value at a time, so it can stop half way."""

    def __init__(self, allocator: BlockAllocator, pool: np.ndarray) -> None:
        self.allocator, self.pool = allocator, pool
        self.table = SequenceTable(allocator.block_size)

    def append(self, value: float) -> None:
        """Store one value."""
        self.table.append(self.allocator)
        self.pool[self.table.translate(self.table.length - 1)] = value

    def extend(self, values: list[float]) -> None:
        """Store all values, or none."""
        for value in values:
            self.append(value)

    def read(self) -> list[float]:
        """Return the values in order."""
        positions = range(self.table.length)
        return [float(self.pool[self.table.translate(p)]) for p in positions]

    def truncate(self, length: int) -> None:
        """Forget the values from `length` on."""
        for position in range(length, self.table.length):
            self.pool[self.table.translate(position)] = np.nan
        self.table.truncate(self.allocator, length)
