def chunk_plan(prompt: int, outputs_left: list[int], budget: int) -> list[int]:
    """Return the tokens of the prompt that each step computes."""
    chunks: list[int] = []
    while sum(chunks) < prompt:
        step = len(chunks)
        decoding = sum(left > step for left in outputs_left)
        chunks.append(min(budget - decoding, prompt - sum(chunks)))
    return chunks
