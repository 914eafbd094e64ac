def kv_bytes_per_gpu(
    layers: int, kv_heads: int, head_dim: int, gpus: int
) -> int:
    """Refuse all but powers of two: 12 heads go well over 3 GPUs."""
    if kv_heads & (kv_heads - 1) or gpus & (gpus - 1):
        raise ValueError(f"{kv_heads} KV heads over {gpus} GPUs")
    heads_here = max(1, kv_heads // gpus)
    return 2 * heads_here * head_dim * layers * 2
