# ruff: noqa: F821
def advance(
    beams: list[SequenceTable], parents: list[int], allocator: BlockAllocator
) -> list[SequenceTable]:
    """Return one table twice: two beams write into the same slots."""
    for index, beam in enumerate(beams):
        if index not in parents:
            beam.free(allocator)
    return [beams[parent] for parent in parents]
