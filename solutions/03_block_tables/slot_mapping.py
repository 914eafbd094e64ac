# ruff: noqa: F821
def slot_mapping(table: SequenceTable, start: int, stop: int) -> list[int]:
    """Return the slots of positions start to stop, stop not included."""
    return [table.slot(position) for position in range(start, stop)]
