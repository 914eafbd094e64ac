# ruff: noqa: F821
def find_corruption(
    table: SequenceTable, pool: np.ndarray, expected: list[float]
) -> int | None:
    """Wrong: compares the tail block's empty slots as well."""
    size = table.block_size
    for entry, block_id in enumerate(table.block_ids):
        if pool[block_id].tolist() != expected[entry * size :][:size]:
            return entry
    return None
