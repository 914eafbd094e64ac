def key_offset(
    row: list[int],
    position: int,
    kv_head: int,
    block_size: int,
    strides: tuple[int, int, int, int],
) -> int:
    """Return the offset of the key's first number."""
    # Right only for block sizes that are powers of two.
    block_id = row[position // block_size]
    slot = position & (block_size - 1)
    return block_id * strides[0] + kv_head * strides[1] + slot * strides[2]
