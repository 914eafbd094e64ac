# ruff: noqa: F821
def grow_all(
    running: dict[str, SequenceTable], allocator: BlockAllocator
) -> dict[str, int]:
    """Wrong: preempts the next in line, not the newest."""
    preempted: dict[str, int] = {}
    for name, table in list(running.items()):
        while name in running:
            try:
                table.append(allocator)
                break
            except OutOfBlocks:
                names = list(running)
                later = names[names.index(name) + 1 :]
                victim = later[0] if later else name
                preempted[victim] = running[victim].length
                running.pop(victim).free(allocator)
    return preempted
