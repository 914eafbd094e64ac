def longest_blocks(
    prompt: int, new: int, samples: int, block_size: int
) -> int:
    """Return the blocks that a request holds at its longest."""
    longest = prompt + new - 1  # the last token is never written
    each = -(-longest // block_size)
    if new == 1:
        return each  # no sample ever writes
    shared = prompt // block_size
    return shared + samples * (each - shared)
