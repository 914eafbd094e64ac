def longest_blocks(
    prompt: int, new: int, samples: int, block_size: int
) -> int:
    """Wrong: every sample has a prompt of its own."""
    return samples * -(-(prompt + new - 1) // block_size)
