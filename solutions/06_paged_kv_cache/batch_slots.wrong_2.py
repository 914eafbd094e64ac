def batch_slots(
    block_tables: list[list[int]],
    lengths: list[int],
    new_tokens: list[int],
    block_size: int,
) -> list[int]:
    """Put every new token into the block of the last one."""
    slots = []
    for row, length, new in zip(
        block_tables, lengths, new_tokens, strict=True
    ):
        tail = row[(length - 1) // block_size]
        for position in range(length - new, length):
            slots.append(tail * block_size + position % block_size)
    return slots
