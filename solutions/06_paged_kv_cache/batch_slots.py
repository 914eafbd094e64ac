def batch_slots(
    block_tables: list[list[int]],
    lengths: list[int],
    new_tokens: list[int],
    block_size: int,
) -> list[int]:
    """Return the slot of each new token, sequence by sequence."""
    slots = []
    for row, length, new in zip(
        block_tables, lengths, new_tokens, strict=True
    ):
        for position in range(length - new, length):
            block, offset = divmod(position, block_size)
            slots.append(row[block] * block_size + offset)
    return slots
