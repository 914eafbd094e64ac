def key_offset(
    row: list[int],
    position: int,
    kv_head: int,
    block_size: int,
    strides: tuple[int, int, int, int],
) -> int:
    """Return the offset of the key's first number."""
    # Assumes that the slots of a head lie side by side.
    block_id = row[position // block_size]
    slot_stride = strides[1] // block_size
    offset = block_id * strides[0] + kv_head * strides[1]
    return offset + position % block_size * slot_stride
