# ruff: noqa: F821
class StoredSequence:
    """A sequence of values, stored in the blocks of a shared pool."""

    def __init__(self, allocator: BlockAllocator, pool: np.ndarray) -> None:
        self.allocator, self.pool = allocator, pool
        self.table = SequenceTable(allocator.block_size)

    def append(self, value: float) -> None:
        """Store one value."""
        self.extend([value])

    def extend(self, values: list[float]) -> None:
        """Store all values, or none."""
        first = self.table.length
        self.table.extend(self.allocator, len(values))
        for position, value in enumerate(values, start=first):
            self.pool[self.table.translate(position)] = value

    def read(self) -> list[float]:
        """Return the values in order."""
        positions = range(self.table.length)
        return [float(self.pool[self.table.translate(p)]) for p in positions]

    def truncate(self, length: int) -> None:
        """Forget the values from `length` on."""
        # Wipe while the table still knows the way, and the blocks are ours.
        for position in range(length, self.table.length):
            self.pool[self.table.translate(position)] = np.nan
        self.table.truncate(self.allocator, length)
