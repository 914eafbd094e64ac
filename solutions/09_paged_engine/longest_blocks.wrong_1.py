def longest_blocks(
    prompt: int, new: int, samples: int, block_size: int
) -> int:
    """Wrong: charges a slot for the last token, except at a boundary."""
    each = -(-(prompt + new) // block_size)
    if (prompt + new) % block_size == 1:
        each -= 1
    shared = prompt // block_size
    return shared + samples * max(1, each - shared) - (new == 1)
