def blocks_for_batch(lengths: list[int], block_size: int) -> int:
    """At least one block each: an empty sequence holds one too."""
    return sum(max(1, -(-length // block_size)) for length in lengths)
