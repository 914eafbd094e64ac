# ruff: noqa: F821
def find_leaks(memory: PagedMemory) -> dict[int, int]:
    """Wrong: stops at the first request that is swapped out."""
    listed: Counter[int] = Counter()
    try:
        for name in sorted(memory.request_ids):
            listed.update(memory.block_ids(name))
    except KeyError:
        pass
    differences = {
        block: memory.allocator.refcount(block) - listed[block]
        for block in range(memory.allocator.num_blocks)
    }
    return {block: n for block, n in differences.items() if n != 0}
