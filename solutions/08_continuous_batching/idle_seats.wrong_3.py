def idle_seats(outputs: list[int], seats: int) -> int:
    """Let every batch last as long as the longest request of all."""
    batches = -(-len(outputs) // seats)
    return seats * batches * max(outputs) - sum(outputs)
