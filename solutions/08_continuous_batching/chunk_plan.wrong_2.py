def chunk_plan(prompt: int, outputs_left: list[int], budget: int) -> list[int]:
    """Let a request that has just finished decode once more."""
    chunks: list[int] = []
    while sum(chunks) < prompt:
        step = len(chunks)
        decoding = sum(left >= step for left in outputs_left)
        chunks.append(min(budget - decoding, prompt - sum(chunks)))
    return chunks
