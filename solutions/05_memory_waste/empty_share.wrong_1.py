# ruff: noqa: F821
def empty_share(usage: Usage) -> float:
    """Wrong: internal slots are forgotten."""
    held = usage.token_states + usage.reserved
    return usage.reserved / held if held > 0 else 0.0
