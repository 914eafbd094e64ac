# ruff: noqa: F821
def decode_step(
    cache: PagedKVCache,
    tables: list[SequenceTable],
    allocator: BlockAllocator,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Drop the copies that `append` asks for."""
    for table in tables:
        table.append(allocator)
    slots = [table.slot(table.length - 1) for table in tables]
    for layer in range(len(keys)):
        cache.write(layer, slots, keys[layer], values[layer])
