# ruff: noqa: F821
def decode_step(
    cache: PagedKVCache,
    tables: list[SequenceTable],
    allocator: BlockAllocator,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Take the slots before all tables have grown."""
    slots, promised = [], []
    for table in tables:
        fits = table.length < table.capacity
        old = table.block_ids[-1] if fits else None
        promised.append(table.append(allocator))
        block_id = table.block_ids[-1] if old is None else old
        offset = (table.length - 1) % table.block_size
        slots.append(block_id * table.block_size + offset)
    cache.copy_blocks(copy for copy in promised if copy is not None)
    for layer in range(len(keys)):
        for i, slot in enumerate(slots):
            rows = keys[layer, i : i + 1], values[layer, i : i + 1]
            cache.write(layer, [slot], *rows)
