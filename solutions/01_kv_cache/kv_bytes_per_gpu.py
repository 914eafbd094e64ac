def kv_bytes_per_gpu(
    layers: int, kv_heads: int, head_dim: int, gpus: int
) -> int:
    """Return the bytes that one token takes on each GPU."""
    if kv_heads % gpus and gpus % kv_heads:
        raise ValueError(f"{kv_heads} KV heads over {gpus} GPUs")
    heads_here = max(1, kv_heads // gpus)
    return 2 * heads_here * head_dim * layers * 2
