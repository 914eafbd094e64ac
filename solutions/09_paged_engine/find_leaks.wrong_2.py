# ruff: noqa: F821
def find_leaks(memory: PagedMemory) -> dict[int, int]:
    """Wrong: finds only blocks that no table lists."""
    listed = set()
    for name in memory.request_ids:
        try:
            listed |= set(memory.block_ids(name))
        except KeyError:
            continue
    return {
        block: memory.allocator.refcount(block)
        for block in range(memory.allocator.num_blocks)
        if block not in listed and memory.allocator.refcount(block) > 0
    }
