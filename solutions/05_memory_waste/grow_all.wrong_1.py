# ruff: noqa: F821
def grow_all(
    running: dict[str, SequenceTable], allocator: BlockAllocator
) -> dict[str, int]:
    """Wrong: preempts once, though a shared table frees no block."""
    preempted: dict[str, int] = {}
    for name, table in list(running.items()):
        if name not in running:
            continue
        try:
            table.append(allocator)
        except OutOfBlocks:
            newest, victim = running.popitem()
            preempted[newest] = victim.length
            victim.free(allocator)
            if newest != name:
                table.append(allocator)
    return preempted
