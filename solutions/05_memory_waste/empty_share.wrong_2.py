# ruff: noqa: F821
def empty_share(usage: Usage) -> float:
    """Wrong: the denominator is the whole pool."""
    return (usage.reserved + usage.internal) / sum(usage)
