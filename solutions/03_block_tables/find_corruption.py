# ruff: noqa: F821
def find_corruption(
    table: SequenceTable, pool: np.ndarray, expected: list[float]
) -> int | None:
    """Return the logical block whose entry is wrong, or None."""
    for position, value in enumerate(expected):
        if pool[table.translate(position)] != value:
            return position // table.block_size
    return None
