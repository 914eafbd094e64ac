# ruff: noqa: F821
def find_leaks(memory: PagedMemory) -> dict[int, int]:
    """Wrong: asks for the blocks of swapped requests, too."""
    listed: Counter[int] = Counter()
    for name in memory.request_ids:
        listed.update(memory.block_ids(name))
    counts = {
        block: memory.allocator.refcount(block) - listed[block]
        for block in range(memory.allocator.num_blocks)
    }
    return {block: n for block, n in counts.items() if n != 0}
