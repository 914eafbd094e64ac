def kv_bytes_per_gpu(
    layers: int, kv_heads: int, head_dim: int, gpus: int
) -> int:
    """Divide the bytes: with many GPUs each would keep half a head."""
    if kv_heads % gpus and gpus % kv_heads:
        raise ValueError(f"{kv_heads} KV heads over {gpus} GPUs")
    return 2 * kv_heads * head_dim * layers * 2 // gpus
