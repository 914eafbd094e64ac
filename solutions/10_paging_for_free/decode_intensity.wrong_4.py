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
    operations += 4 * num_heads * head_dim * tokens * num_layers
    cached = 2 * num_kv_heads * head_dim * tokens * num_layers
    return operations / (itemsize * weights + 4 * cached)
