# ruff: noqa: F821
def grow_all(
    running: dict[str, SequenceTable], allocator: BlockAllocator
) -> dict[str, int]:
    """Append a token to each; return what the preempted requests held."""
    preempted: dict[str, int] = {}
    for name, table in list(running.items()):
        while name in running:
            try:
                table.append(allocator)
                break
            except OutOfBlocks:
                newest, victim = running.popitem()
                preempted[newest] = victim.length
                victim.free(allocator)
    return preempted
