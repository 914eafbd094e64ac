def chunk_plan(prompt: int, outputs_left: list[int], budget: int) -> list[int]:
    """Fill the budget with the last chunk, past the end of the prompt."""
    chunks: list[int] = []
    while sum(chunks) < prompt:
        step = len(chunks)
        decoding = sum(left > step for left in outputs_left)
        chunks.append(budget - decoding)
    return chunks
