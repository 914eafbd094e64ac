# ruff: noqa: F821
def decode_step(
    cache: PagedKVCache,
    tables: list[SequenceTable],
    allocator: BlockAllocator,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Write before the copies: they overwrite the new tokens."""
    promised = [table.append(allocator) for table in tables]
    slots = [table.slot(table.length - 1) for table in tables]
    for layer in range(len(keys)):
        cache.write(layer, slots, keys[layer], values[layer])
    cache.copy_blocks(copy for copy in promised if copy is not None)
