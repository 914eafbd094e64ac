# ruff: noqa: F821
def grow_all(
    running: dict[str, SequenceTable], allocator: BlockAllocator
) -> dict[str, int]:
    """Wrong: a request that is itself the newest stays, without its token."""
    preempted: dict[str, int] = {}
    for name, table in list(running.items()):
        while name in running:
            try:
                table.append(allocator)
                break
            except OutOfBlocks:
                newest = list(running)[-1]
                if newest == name:
                    break
                preempted[newest] = running[newest].length
                running.pop(newest).free(allocator)
    return preempted
