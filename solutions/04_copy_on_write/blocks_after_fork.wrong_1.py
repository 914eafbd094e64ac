def blocks_after_fork(
    prompt: int, n: int, new_tokens: int, block_size: int
) -> int:
    """Give each sample a tail of its own, also before it has written."""
    shared = prompt // block_size
    each = -(-(prompt + new_tokens) // block_size)
    return shared + n * (each - shared)
