def blocks_after_fork(
    prompt: int, n: int, new_tokens: int, block_size: int
) -> int:
    """Count the new tokens from a block's start, not from the tail's end."""
    if new_tokens == 0:
        return -(-prompt // block_size)
    return prompt // block_size + n * -(-new_tokens // block_size)
