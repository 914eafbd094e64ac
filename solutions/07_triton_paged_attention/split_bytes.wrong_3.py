def split_bytes(
    lengths: list[int], num_kv_heads: int, group: int, dim: int, splits: int
) -> int:
    """Return the bytes that the launches of rung 4 move."""
    # Leaves out the splits without a token, which store their zeros too.
    cache = 2 * sum(lengths) * num_kv_heads * dim * 4
    used = sum(min(splits, -(-n // 16)) for n in lengths)
    parts = used * num_kv_heads * group * (dim + 1) * 4
    return cache + 2 * parts
