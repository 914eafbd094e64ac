# ruff: noqa: F821
def find_corruption(
    table: SequenceTable, pool: np.ndarray, expected: list[float]
) -> int | None:
    """Wrong: looks at the first value of each block only."""
    for entry, block_id in enumerate(table.block_ids):
        if pool[block_id, 0] != expected[entry * table.block_size]:
            return entry
    return None
