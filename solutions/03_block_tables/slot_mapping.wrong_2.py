# ruff: noqa: F821
def slot_mapping(table: SequenceTable, start: int, stop: int) -> list[int]:
    """Wrong: gives slots to positions that hold no token."""
    slots = []
    for position in range(start, stop):
        block, offset = divmod(position, table.block_size)
        slots.append(table.block_ids[block] * table.block_size + offset)
    return slots
