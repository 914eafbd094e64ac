def batch_slots(
    block_tables: list[list[int]],
    lengths: list[int],
    new_tokens: list[int],
    block_size: int,
) -> list[int]:
    """Count up from the first slot: wrong where a block ends."""
    slots = []
    for row, length, new in zip(
        block_tables, lengths, new_tokens, strict=True
    ):
        block, offset = divmod(length - new, block_size)
        first = row[block] * block_size + offset
        slots += range(first, first + new)
    return slots
