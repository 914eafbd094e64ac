def decode_intensity(
    batch: int,
    tokens: int,
    weights: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> float:
    """Return operations per byte of weights, keys and values."""
    operations = 2 * weights * batch
    operations += 4 * num_heads * head_dim * tokens * 6
    numbers = weights + 2 * num_kv_heads * head_dim * tokens * 6
    return operations / (itemsize * numbers)
