# ruff: noqa: F821
def decode_step(
    cache: PagedKVCache,
    tables: list[SequenceTable],
    allocator: BlockAllocator,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Append one token to each table and write it in every layer."""
    promised = [table.append(allocator) for table in tables]
    cache.copy_blocks(copy for copy in promised if copy is not None)
    slots = [table.slot(table.length - 1) for table in tables]
    for layer in range(len(keys)):
        cache.write(layer, slots, keys[layer], values[layer])
