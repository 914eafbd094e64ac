def longest_blocks(
    prompt: int, new: int, samples: int, block_size: int
) -> int:
    """Wrong: with one new token no sample writes, yet each is charged."""
    each = -(-(prompt + new - 1) // block_size)
    shared = prompt // block_size
    return shared + samples * (each - shared)
