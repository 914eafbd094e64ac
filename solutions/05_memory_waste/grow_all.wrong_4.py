# ruff: noqa: F821
def grow_all(
    running: dict[str, SequenceTable], allocator: BlockAllocator
) -> dict[str, int]:
    """Wrong: returns the oldest first, not in order of preemption."""
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
    return dict(reversed(preempted.items()))
