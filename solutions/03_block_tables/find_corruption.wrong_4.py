# ruff: noqa: F821
def find_corruption(
    table: SequenceTable, pool: np.ndarray, expected: list[float]
) -> int | None:
    """Wrong: looks at the last value of each block only."""
    size = table.block_size
    for entry in range(len(table.block_ids)):
        last = min((entry + 1) * size, table.length) - 1
        if pool[table.translate(last)] != expected[last]:
            return entry
    return None
