# ruff: noqa: F821
def swap_out_family(
    cache: PagedKVCache,
    tables: list[SequenceTable],
    allocator: BlockAllocator,
    host: BlockAllocator,
) -> None:
    """Move all blocks of the tables to the host, each one once."""
    distinct = list(dict.fromkeys(b for t in tables for b in t.block_ids))
    moved = dict(zip(distinct, host.allocate(len(distinct)), strict=True))
    cache.swap_out(BlockCopy(*pair) for pair in moved.items())
    listed = set()
    for table in tables:
        for block_id in table.block_ids:
            if block_id in listed:
                host.incref(moved[block_id])
            listed.add(block_id)
            allocator.free(block_id)
        table.block_ids = [moved[block_id] for block_id in table.block_ids]
