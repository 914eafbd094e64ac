# ruff: noqa: F821
def swap_out_family(
    cache: PagedKVCache,
    tables: list[SequenceTable],
    allocator: BlockAllocator,
    host: BlockAllocator,
) -> None:
    """Take host blocks one by one: a refusal leaves half a swap behind."""
    moved: dict[int, int] = {}
    for table in tables:
        for i, block_id in enumerate(table.block_ids):
            if block_id in moved:
                host.incref(moved[block_id])
            else:
                moved[block_id] = host.alloc()
                cache.swap_out([BlockCopy(block_id, moved[block_id])])
            allocator.free(block_id)
            table.block_ids[i] = moved[block_id]
