# ruff: noqa: F821
def find_leaks(memory: PagedMemory) -> dict[int, int]:
    """Wrong: misses a block that was freed once too often."""
    listed: Counter[int] = Counter()
    for name in memory.request_ids:
        try:
            listed.update(memory.block_ids(name))
        except KeyError:
            continue
    counts = {
        block: memory.allocator.refcount(block) - listed[block]
        for block in range(memory.allocator.num_blocks)
    }
    return {block: n for block, n in counts.items() if n > 0}
