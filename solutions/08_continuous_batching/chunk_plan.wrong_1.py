def chunk_plan(prompt: int, outputs_left: list[int], budget: int) -> list[int]:
    """Take those who decode for as many until the end."""
    room = max(1, budget - len(outputs_left))
    chunks: list[int] = []
    while sum(chunks) < prompt:
        chunks.append(min(room, prompt - sum(chunks)))
    return chunks
