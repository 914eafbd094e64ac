# ruff: noqa: F821
def slot_mapping(table: SequenceTable, start: int, stop: int) -> list[int]:
    """Wrong: starts every range at the beginning of a block."""
    if not 0 <= start <= stop <= table.length:
        raise IndexError(f"[{start}, {stop}) is outside [0, {table.length})")
    size = table.block_size
    slots = []
    for block_id in table.block_ids[start // size :]:
        slots += range(block_id * size, (block_id + 1) * size)
    return slots[: stop - start]
