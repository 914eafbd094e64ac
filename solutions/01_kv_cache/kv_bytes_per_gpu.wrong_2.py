def kv_bytes_per_gpu(
    layers: int, kv_heads: int, head_dim: int, gpus: int
) -> int:
    """Round down, and refuse nothing: some heads are on no GPU."""
    heads_here = max(1, kv_heads // gpus)
    return 2 * heads_here * head_dim * layers * 2
