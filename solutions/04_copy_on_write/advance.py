# ruff: noqa: F821
def advance(
    beams: list[SequenceTable], parents: list[int], allocator: BlockAllocator
) -> list[SequenceTable]:
    """Return the next beams: the i-th continues beams[parents[i]]."""
    continued: set[int] = set()
    survivors = []
    for parent in parents:
        table = beams[parent]
        if parent in continued:
            table = fork_sequence(table, allocator)
        continued.add(parent)
        survivors.append(table)
    for index, beam in enumerate(beams):
        if index not in continued:
            beam.free(allocator)
    return survivors
