# ruff: noqa: F821
def advance(
    beams: list[SequenceTable], parents: list[int], allocator: BlockAllocator
) -> list[SequenceTable]:
    """Leak the losers: nobody holds their tables, and their counts stay."""
    continued: set[int] = set()
    survivors = []
    for parent in parents:
        table = beams[parent]
        if parent in continued:
            table = fork_sequence(table, allocator)
        continued.add(parent)
        survivors.append(table)
    return survivors
