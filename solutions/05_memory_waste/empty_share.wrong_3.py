# ruff: noqa: F821
def empty_share(usage: Usage) -> float:
    """Wrong: divides by zero when nobody holds anything."""
    empty = usage.reserved + usage.internal
    return empty / (usage.token_states + empty)
