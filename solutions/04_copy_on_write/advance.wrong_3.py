# ruff: noqa: F821
def advance(
    beams: list[SequenceTable], parents: list[int], allocator: BlockAllocator
) -> list[SequenceTable]:
    """Fork one time too many: the first child keeps the parent's table."""
    survivors = [fork_sequence(beams[p], allocator) for p in parents]
    for i, parent in enumerate(parents):
        if parent not in parents[:i]:
            survivors[i] = beams[parent]
    for index, beam in enumerate(beams):
        if index not in parents:
            beam.free(allocator)
    return survivors
