def split_bytes(
    lengths: list[int], num_kv_heads: int, group: int, dim: int, splits: int
) -> int:
    """Return the bytes that the launches of rung 4 move."""
    # Counts one result per KV head: there is one per query head.
    cache = 2 * sum(lengths) * num_kv_heads * dim * 4
    parts = len(lengths) * num_kv_heads * splits * (dim + 1) * 4
    return cache + 2 * parts
