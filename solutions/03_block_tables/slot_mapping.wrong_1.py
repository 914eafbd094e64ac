# ruff: noqa: F821
def slot_mapping(table: SequenceTable, start: int, stop: int) -> list[int]:
    """Wrong: takes the slots after the first for neighbours."""
    if start == stop:
        return []
    table.slot(stop - 1)
    first = table.slot(start)
    return list(range(first, first + stop - start))
