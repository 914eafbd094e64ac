def split_bytes(
    lengths: list[int], num_kv_heads: int, group: int, dim: int, splits: int
) -> int:
    """Return the bytes that the launches of rung 4 move."""
    # Reads the cache once per query head, as rung 1 does.
    cache = 2 * sum(lengths) * num_kv_heads * group * dim * 4
    parts = len(lengths) * num_kv_heads * group * splits * (dim + 1) * 4
    return cache + 2 * parts
