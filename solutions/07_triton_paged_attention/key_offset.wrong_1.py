def key_offset(
    row: list[int],
    position: int,
    kv_head: int,
    block_size: int,
    strides: tuple[int, int, int, int],
) -> int:
    """Return the offset of the key's first number."""
    # Takes the logical block for the physical one.
    block, slot = divmod(position, block_size)
    return block * strides[0] + kv_head * strides[1] + slot * strides[2]
