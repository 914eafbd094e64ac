# ruff: noqa: F821
def empty_share(usage: Usage) -> float:
    """Return the share of the held slots that hold no token."""
    empty = usage.reserved + usage.internal
    held = usage.token_states + empty
    return empty / held if held > 0 else 0.0
