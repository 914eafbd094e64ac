def blocks_after_fork(
    prompt: int, n: int, new_tokens: int, block_size: int
) -> int:
    """Count the copies of the tail, and forget that samples grow."""
    blocks = -(-prompt // block_size)
    if new_tokens > 0 and prompt % block_size > 0:
        blocks += n - 1
    return blocks
