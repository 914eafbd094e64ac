# ruff: noqa: F821
def find_leaks(memory: PagedMemory) -> dict[int, int]:
    """Wrong: a shared block is expected to have one owner."""
    listed = set()
    for name in memory.request_ids:
        try:
            listed |= set(memory.block_ids(name))
        except KeyError:
            continue
    counts = {
        block: memory.allocator.refcount(block) - (block in listed)
        for block in range(memory.allocator.num_blocks)
    }
    return {block: n for block, n in counts.items() if n != 0}
