# ruff: noqa: F821
def find_corruption(
    table: SequenceTable, pool: np.ndarray, expected: list[float]
) -> int | None:
    """Wrong: returns the physical block, not the logical one."""
    for position, value in enumerate(expected):
        block_id, offset = table.translate(position)
        if pool[block_id, offset] != value:
            return block_id
    return None
