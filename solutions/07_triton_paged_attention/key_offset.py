def key_offset(
    row: list[int],
    position: int,
    kv_head: int,
    block_size: int,
    strides: tuple[int, int, int, int],
) -> int:
    """Return the offset of the key's first number."""
    block_id = row[position // block_size]
    slot = position % block_size
    block_stride, head_stride, slot_stride, _ = strides
    return block_id * block_stride + kv_head * head_stride + slot * slot_stride
