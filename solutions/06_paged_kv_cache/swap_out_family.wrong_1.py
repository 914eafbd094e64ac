# ruff: noqa: F821
def swap_out_family(
    cache: PagedKVCache,
    tables: list[SequenceTable],
    allocator: BlockAllocator,
    host: BlockAllocator,
) -> None:
    """Swap table by table: a shared block goes to the host twice."""
    for table in tables:
        away = host.allocate(len(table.block_ids))
        cache.swap_out(map(BlockCopy, table.block_ids, away))
        for block_id in table.block_ids:
            allocator.free(block_id)
        table.block_ids = away
