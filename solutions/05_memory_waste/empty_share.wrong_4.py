# ruff: noqa: F821
def empty_share(usage: Usage) -> float:
    """Wrong: with no token at all nothing would be empty."""
    if usage.token_states == 0:
        return 0.0
    empty = usage.reserved + usage.internal
    return empty / (usage.token_states + empty)
