# ruff: noqa: F821
def find_leaks(memory: PagedMemory) -> dict[int, int]:
    """Return count minus tables for each block where they differ."""
    listed: Counter[int] = Counter()
    for name in memory.request_ids:
        try:
            listed.update(memory.block_ids(name))
        except KeyError:
            continue  # swapped out: its blocks are the host's
    differences = {
        block: memory.allocator.refcount(block) - listed[block]
        for block in range(memory.allocator.num_blocks)
    }
    return {block: n for block, n in differences.items() if n != 0}
