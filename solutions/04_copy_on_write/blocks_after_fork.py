def blocks_after_fork(
    prompt: int, n: int, new_tokens: int, block_size: int
) -> int:
    """Return the blocks that n samples of one prompt use together."""
    shared = prompt // block_size
    each = -(-(prompt + new_tokens) // block_size)
    if new_tokens == 0:  # nobody has written: the tail is shared too
        return each
    return shared + n * (each - shared)
