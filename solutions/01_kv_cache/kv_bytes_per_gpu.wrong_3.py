def kv_bytes_per_gpu(
    layers: int, kv_heads: int, head_dim: int, gpus: int
) -> int:
    """Refuse more GPUs than heads, where heads could be replicated."""
    if kv_heads % gpus:
        raise ValueError(f"{kv_heads} KV heads over {gpus} GPUs")
    return 2 * (kv_heads // gpus) * head_dim * layers * 2
