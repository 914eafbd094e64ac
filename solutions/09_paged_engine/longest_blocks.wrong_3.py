def longest_blocks(
    prompt: int, new: int, samples: int, block_size: int
) -> int:
    """Wrong: the samples share the partly filled block for ever."""
    each = -(-(prompt + new - 1) // block_size)
    shared = -(-prompt // block_size)
    return shared + samples * (each - shared)
